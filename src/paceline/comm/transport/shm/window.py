"""All ranks' memory at once, and ticks to wait for: what the fast all-reduce works on.

Every rank counts its ticks; in a window call all ranks make the same number of them, so "everybody has
reached my tick" is a barrier without a coordinator. The first tick of a call also shows the call's
signature: ranks in different calls find out at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from paceline.comm.calls import Call, RankState
from paceline.comm.transport.shm import sync
from paceline.comm.transport.shm.board import PID, REACHES, SIGNATURES, STATE, TICK, WORD, Board
from paceline.comm.transport.shm.layout import Layout
from paceline.comm.transport.shm.reach import Reach
from paceline.comm.transport.watch import Watch

_MASK, _HALF = 0xFFFFFFFF, 0x80000000
_ENTRY = (
    4  # 64-bit words of a signature entry: sequence, signature, where the input is, where the result goes
)
_YES, _NO, _SLOW = 1, 2, 3
_TRIAL = 1 << 20
_WAKE_SECONDS, _LAST_SECONDS = 0.0005, 1.0
_OFFERED: list[Tensor] = []
"""Memory offered to peers in a call that failed: a late one may still copy, so it is never reused."""
_WORTH = 1.8
"""Going through slots copies nearly twice as many bytes as reaching does."""


class ShmWindow:
    def __init__(self, board: Board, layout: Layout, segment: Tensor, *, spins: int, crowded: bool) -> None:
        self._board = board
        self._rank = board.rank
        self._world = board.world_size
        self._segment = segment
        self._base = segment.data_ptr()
        self._end = self._base + segment.numel()
        self._arenas = self._base + layout.arena(0)
        self._words, self._longs = board.words, board.longs
        self._mine = board.word(board.rank, TICK)
        self._my_address = board.address(board.rank, TICK)
        self._others = [
            (board.word(rank, TICK), rank) for rank in range(board.world_size) if rank != board.rank
        ]
        self._entries = [board.long(rank, SIGNATURES) for rank in range(board.world_size)]
        self._my_entry = self._entries[board.rank]
        self._ticks = 0
        self._calls = 0
        self._spins = spins
        # With a core for every rank a yield only costs; with fewer it lets the one run that is waited for.
        self._yield_mask = 0 if crowded else 0xFF
        self._reach = Reach()
        self.reachable: bool | None = None
        self._sleeps_on = 0
        self.prepared: dict[object, object] = {}
        world = layout.world_size
        self.small = _area(segment, layout.small, 2, world, layout.small_bytes)
        self.staging = _area(segment, layout.staging, 3, world, layout.stage_bytes)
        self.results = _area(segment, layout.results, 3, 1, layout.stage_bytes)[:, 0]

    def offset_of(self, tensor: Tensor) -> int | None:
        address = tensor.data_ptr()
        return address - self._base if self._arenas <= address < self._end else None

    def at(self, offset: int, nbytes: int) -> Tensor:
        return self._segment[offset : offset + nbytes]

    def next_slot(self) -> int:
        # Calls alternate. Who fills a slot again has seen everybody's tick of the call in between, so
        # nobody reads the
        # old content any more.
        return (self._calls + 1) & 1

    def tick(self, call: Call | None = None, source: int = 0, target: int = 0) -> int:
        if call is not None:
            self._calls += 1
            entry = self._my_entry + (self._calls & 1) * _ENTRY
            longs = self._longs
            longs[entry] = call.sequence
            longs[entry + 1] = call.signature
            longs[entry + 2] = source
            longs[entry + 3] = target
        tick = self._ticks = (self._ticks + 1) & _MASK
        sync.fence()
        self._words[self._mine] = tick
        if self._others:
            sync.wake(self._my_address)
        return tick

    def wait(self, tick: int, call: Call, deadline: float) -> None:
        words = self._words
        for index, rank in self._others:
            if (words[index] - tick) & _MASK < _HALF:
                continue
            for turn in range(self._spins):
                if (words[index] - tick) & _MASK < _HALF:
                    break
                if turn & self._yield_mask == 0:
                    os.sched_yield()
            else:
                self._wait_long(index, rank, tick, call, deadline)
        sync.fence()

    def never_met(self, tick: int) -> bool:
        return any(
            not sync.reached(self._words[index], tick) and self._board.is_gone(rank)
            for index, rank in self._others
        )

    def meet(self, call: Call, deadline: float) -> None:
        self.wait(self.tick(call), call, deadline)
        self._check(call, deadline)

    def locations(self, call: Call, deadline: float) -> tuple[list[int], list[int]]:
        self._check(call, deadline)
        parity = (self._calls & 1) * _ENTRY
        longs = self._longs
        places = [entry + parity for entry in self._entries]
        return [longs[place + 2] for place in places], [longs[place + 3] for place in places]

    def can_reach(self, call: Call, deadline: float) -> bool:
        if self.reachable is None:
            self.reachable = self._try_reach(call, deadline)
        return self.reachable

    def _try_reach(self, call: Call, deadline: float) -> bool:
        """Permission is tried with one word of every peer; speed with a megabyte of the next one, by
        everybody at once."""
        board, longs = self._board, self._longs
        buffer = torch.zeros(_TRIAL, dtype=torch.uint8, device="cpu")
        mine = board.long(self._rank, WORD)
        longs[mine], longs[mine + 1] = self._reach.address, self._reach.word.value
        longs[mine + 2] = buffer.data_ptr()
        self._reach.allow_siblings()
        self.staging[:, self._rank] = 0
        self.wait(self.tick(), call, deadline)
        allowed = all(self._try(rank) for _, rank in self._others)
        verdict = _NO
        if allowed and self._others:
            peer = (self._rank + 1) % self._world
            slot, into = self.staging[0, peer], torch.zeros(_TRIAL, dtype=torch.uint8, device="cpu")
            address = longs[board.long(peer, WORD) + 2]
            reading = _fastest(lambda: self.read(peer, address, into, call, deadline))
            copying = _fastest(lambda: into[: slot.numel()].copy_(slot)) * _TRIAL / slot.numel()
            verdict = _YES if reading < copying * _WORTH else _SLOW
        board.words[board.word(self._rank, REACHES)] = verdict
        self.wait(self.tick(), call, deadline)
        verdicts = [board.words[board.word(rank, REACHES)] for rank in range(self._world)]
        return _NO not in verdicts and verdicts.count(_YES) * 2 >= self._world

    def read(self, rank: int, address: int, into: Tensor, call: Call, deadline: float) -> None:
        self._copy(self._reach.read, rank, address, into, call, deadline)

    def write(self, rank: int, address: int, data: Tensor, call: Call, deadline: float) -> None:
        self._copy(self._reach.write, rank, address, data, call, deadline)

    def _copy(
        self,
        copy: Callable[[int, int, int, int], int],
        rank: int,
        address: int,
        here: Tensor,
        call: Call,
        deadline: float,
    ) -> None:
        nbytes = here.numel() * here.element_size()
        pid = self._board.words[self._board.word(rank, PID)]
        pointer = here.data_ptr()
        done = 0
        while done < nbytes:
            # A rank that has given up no longer offers its memory, whatever it uses it for now.
            if self._words[self._board.word(rank, STATE)] != RankState.RUNNING.value:
                self._unreachable(rank, call, deadline)
            count = copy(pid, address + done, pointer + done, nbytes - done)
            if count <= 0:
                self._unreachable(rank, call, deadline)
            done += count

    def keep_offered(self, *tensors: Tensor) -> None:
        # What lies in the window stays with the segment, and the broken group hands none of it out again.
        if self.reachable:
            _OFFERED.extend(tensor for tensor in tensors if self.offset_of(tensor) is None)

    def _try(self, rank: int) -> bool:
        board = self._board
        at = board.long(rank, WORD)
        return self._reach.try_word(board.words[board.word(rank, PID)], self._longs[at], self._longs[at + 1])

    def _unreachable(self, rank: int, call: Call, deadline: float) -> None:
        """A peer that could be reached before cannot be any more: it is dying, and the board will say so
        in a moment."""
        self._sleeps_on = self._my_address
        try:
            with Watch(self._board, call.status([rank]), deadline) as watch:
                while True:
                    if watch.look():
                        self._board.sleep(self._rank, TICK, self._words[self._mine])
        finally:
            self._sleeps_on = 0

    def _check(self, call: Call, deadline: float) -> None:
        longs, signature, sequence = self._longs, call.signature, call.sequence
        parity = (self._calls & 1) * _ENTRY
        for entry in self._entries:
            at = entry + parity
            if longs[at + 1] != signature or longs[at] != sequence:
                with self._watch(call, deadline) as watch:
                    watch.disagree("ranks made different calls")

    def _wait_long(self, index: int, rank: int, tick: int, call: Call, deadline: float) -> None:
        value = self._words[index]
        # First the word to `wake_sleeper`, then the look at who may call it: one of the two is seen.
        self._sleeps_on = self._board.address(rank, TICK)
        try:
            if not sync.reached(value, tick):
                self._board.check_open()
                self._board.sleep(rank, TICK, value)
            if sync.reached(self._words[index], tick):
                return
            with self._watch(call, deadline) as watch:
                while not sync.reached(value := self._words[index], tick):
                    if watch.look():
                        self._board.sleep(rank, TICK, value)
        finally:
            self._sleeps_on = 0

    def wake_sleeper(self) -> None:
        """Lets a thread of this rank look around that waits for a tick."""
        end = time.monotonic() + _LAST_SECONDS
        # It may be about to sleep: then the first call comes too early.
        while (address := self._sleeps_on) and time.monotonic() < end:
            sync.wake(address)
            time.sleep(_WAKE_SECONDS)

    def _watch(self, call: Call, deadline: float) -> AbstractContextManager[Watch]:
        waits_for = tuple(
            rank for index, rank in self._others if not sync.reached(self._words[index], self._ticks)
        )
        return Watch(self._board, call.status(waits_for), deadline)


def _area(segment: Tensor, start: int, depth: int, rows: int, width: int) -> Tensor:
    return torch.as_strided(segment, (depth, rows, width), (rows * width, width, 1), start)


def _fastest(action: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)
