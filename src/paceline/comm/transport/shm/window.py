"""`base.Window` for the processes of one host: the memory of all ranks, and ticks to wait for.

Every rank counts its ticks; in a window call all ranks make the same number of them, so "all ranks have
reached my tick" is a barrier without a coordinator. The first tick of a call also shows the call's
signature: ranks in different calls find out at once. The transport lays out the scratch areas (`small`,
`staging`, `results`), the algorithms decide when they are reused (algorithms/shm); `prepared` belongs to the
algorithms.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.comm.call_status import CollectiveCall, RankState, in_background
from paceline.comm.transport.shm import futex
from paceline.comm.transport.shm.cross_memory import CrossMemory
from paceline.comm.transport.shm.status_board import PID, REACHES, SIGNATURES, STATE, TICK, WORD, StatusBoard
from paceline.comm.transport.wait_watch import Watch
from paceline.core.shm_segment_layout import SegmentLayout

_MASK, _HALF = 0xFFFFFFFF, 0x80000000
_ENTRY = 4  # 64-bit words of a signature entry: sequence, signature, location of the input, of the result
_YES, _NO, _SLOW = 1, 2, 3
_TRIAL = 1 << 20
_TURNS = 5
_BACKGROUND_SPINS = 2
_WORTH = 2.0
"""Going through slots writes the result twice, into a slot and into its place; and two ranks that share a
core during the trial find slots cheap, which they are not once each rank has a core."""
_WAKE_SECONDS, _LAST_SECONDS = 0.0005, 1.0


class ShmWindow:
    """The `base.Window` of a segment: its memory, and ticks in the rows of the status board. The Protocols
    say what the methods do."""

    def __init__(
        self, board: StatusBoard, layout: SegmentLayout, segment: Tensor, *, spins: int, crowded: bool
    ) -> None:
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
        self._others = [(board.word(rank, TICK), rank) for rank in range(self._world) if rank != self._rank]
        self._entries = [board.long(rank, SIGNATURES) for rank in range(board.world_size)]
        self._my_entry = self._entries[board.rank]
        self._ticks = 0
        # Calls alternate between the two slots. A rank that fills a slot again has seen the tick of every
        # rank in the call in between, so no rank still reads the old content.
        self.next_slot = 1
        self._spins = spins
        # With a core for every rank a yield only costs; with fewer it lets the one run that is waited for.
        self._yield_mask = 0 if crowded else 0xFF
        self._reach = CrossMemory()
        self.reachable: bool | None = None
        self._sleeps_on = 0
        self.prepared: dict[object, object] = {}
        # uint8: [2, world, small_bytes], [3, world, stage_bytes] and [3, stage_bytes]
        self.small = _area(segment, layout.small, 2, self._world, layout.small_bytes)
        self.staging = _area(segment, layout.staging, 3, self._world, layout.stage_bytes)
        self.results = _area(segment, layout.results, 3, 1, layout.stage_bytes)[:, 0]

    def offset_of(self, tensor: Tensor) -> int | None:
        address = tensor.data_ptr()
        return address - self._base if self._arenas <= address < self._end else None

    def at(self, offset: int, nbytes: int) -> Tensor:
        return self._segment[offset : offset + nbytes]

    def signal(self, call: CollectiveCall | None = None, source: int = 0, target: int = 0) -> int:
        # Order matters: the entry, then the tick that announces it, then the wake-up. A peer reads the
        # entry only after it has seen the tick. Entries alternate with the calls: a peer that is one call
        # behind still finds the one it compares, and none can be two calls behind.
        if call is not None:
            entry = self._my_entry + self.next_slot * _ENTRY
            self.next_slot ^= 1
            longs = self._longs
            longs[entry] = call.sequence
            longs[entry + 1] = call.signature
            longs[entry + 2] = source
            longs[entry + 3] = target
        tick = self._ticks = (self._ticks + 1) & _MASK
        futex.fence()
        self._words[self._mine] = tick
        if self._others:
            futex.wake(self._my_address)
        return tick

    def wait(self, tick: int, call: CollectiveCall, deadline: float) -> None:
        words = self._words
        for index, rank in self._others:
            if (words[index] - tick) & _MASK < _HALF:
                continue
            # A spinning thread holds the interpreter lock: in the background it would stop the thread for
            # which it works.
            for turn in range(_BACKGROUND_SPINS if in_background() else self._spins):
                if (words[index] - tick) & _MASK < _HALF:
                    break
                if turn & self._yield_mask == 0:
                    os.sched_yield()
            else:
                self._wait_long(index, rank, tick, call, deadline)
        futex.fence()

    def is_unreachable(self, tick: int) -> bool:
        return any(
            not futex.reached(self._words[index], tick) and self._board.is_gone(rank)
            for index, rank in self._others
        )

    def barrier(self, call: CollectiveCall, deadline: float) -> None:
        self.wait(self.signal(call), call, deadline)
        self._check(call, deadline)

    def locations(self, call: CollectiveCall, deadline: float) -> tuple[list[int], list[int]]:
        self._check(call, deadline)
        parity = (self.next_slot ^ 1) * _ENTRY
        longs = self._longs
        entries = [entry + parity for entry in self._entries]
        return [longs[entry + 2] for entry in entries], [longs[entry + 3] for entry in entries]

    def can_reach(self, call: CollectiveCall, deadline: float) -> bool:
        if self.reachable is None:
            self.reachable = self._try_reach(call, deadline)
        return self.reachable

    def _try_reach(self, call: CollectiveCall, deadline: float) -> bool:
        """Try cross-process copies, all ranks at once: permission with one word of every peer, speed with a
        megabyte of the next one.

        The answer must be the same on all ranks, because it decides which way they reduce. So each rank
        publishes its vote, and all compute the answer from the same votes after the same tick.
        """
        board, longs = self._board, self._longs
        # Published with plain stores; the tick below is what makes them readable: a peer that has seen it
        # has seen them, too (`signal` puts a fence before it).
        buffer = torch.zeros(_TRIAL, dtype=torch.uint8, device="cpu")
        mine = board.long(self._rank, WORD)
        longs[mine], longs[mine + 1] = self._reach.address, self._reach.word.value
        longs[mine + 2] = buffer.data_ptr()  # `buffer` lives until the second tick: no peer reads it later
        self._reach.allow_siblings()
        self.staging[:, self._rank] = 0  # so that its pages exist: a page fault is not what is measured
        self.wait(self.signal(), call, deadline)  # addresses and words of all ranks are published
        allowed = all(
            self._reach.try_word(board.words[board.word(rank, PID)], *longs[at : at + 2])
            for rank, at in ((rank, board.long(rank, WORD)) for _, rank in self._others)
        )
        vote = _NO
        # Every rank takes part in the trial, whatever it found: all of them signal the same ticks.
        reading, copying = self._time_both_ways(buffer, allowed, call, deadline)
        if allowed and self._others:
            # In containers that intercept system calls a read works, and is slower than two copies.
            vote = _YES if reading < copying * _WORTH else _SLOW
        board.words[board.word(self._rank, REACHES)] = vote
        # The second tick closes two races: no rank reads a vote that is not written yet, and no rank frees
        # `buffer` while a peer still measures with it.
        self.wait(self.signal(), call, deadline)
        votes = [board.words[board.word(rank, REACHES)] for rank in range(self._world)]
        # One refusal rules it out, since every rank reaches every other. Speed is a matter of noise: the
        # majority decides.
        return _NO not in votes and votes.count(_YES) * 2 >= self._world

    def _time_both_ways(
        self, buffer: Tensor, allowed: bool, call: CollectiveCall, deadline: float
    ) -> tuple[float, float]:
        """Return the seconds for a megabyte of the next rank's memory: read directly, and through slots.

        In every turn the data is written anew and, after a tick, read by the peer. That is what makes a
        transfer dear: a slot that a peer has read costs several times as much to fill as private memory.
        """
        peer = (self._rank + 1) % self._world
        mine, slot = self.staging[0, self._rank], self.staging[0, peer]
        into = torch.zeros(_TRIAL, dtype=torch.uint8, device="cpu")
        address = self._longs[self._board.long(peer, WORD) + 2]
        reading: list[float] = []
        copying: list[float] = []
        for turn in range(_TURNS):
            buffer.fill_(turn)
            filling = _seconds(lambda: mine.copy_(buffer[: mine.numel()]))
            self.wait(self.signal(), call, deadline)
            if allowed and self._others:
                reading.append(_seconds(lambda: self.read(peer, address, into, call, deadline)))
            copying.append(filling + _seconds(lambda: into[: slot.numel()].copy_(slot)))
            self.wait(self.signal(), call, deadline)
        # Noise only ever adds to a time.
        return min(reading, default=0.0), min(copying) * _TRIAL / slot.numel()

    def read(self, rank: int, address: int, into: Tensor, call: CollectiveCall, deadline: float) -> None:
        self._copy(self._reach.read, rank, address, into, call, deadline)

    def write(self, rank: int, address: int, data: Tensor, call: CollectiveCall, deadline: float) -> None:
        self._copy(self._reach.write, rank, address, data, call, deadline)

    def _copy(
        self,
        copy: Callable[[int, int, int, int], int],
        rank: int,
        address: int,
        here: Tensor,
        call: CollectiveCall,
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

    def _unreachable(self, rank: int, call: CollectiveCall, deadline: float) -> None:
        """Wait until the board shows why a peer can no longer be reached: its process is ending."""
        self._sleeps_on = self._my_address
        try:
            with Watch(self._board, call.status([rank]), deadline) as watch:
                while True:
                    if watch.look():
                        self._board.sleep(self._rank, TICK, self._words[self._mine])
        finally:
            self._sleeps_on = 0

    def _check(self, call: CollectiveCall, deadline: float) -> None:
        longs, signature, sequence = self._longs, call.signature, call.sequence
        parity = (self.next_slot ^ 1) * _ENTRY
        for entry in self._entries:
            at = entry + parity
            if longs[at + 1] != signature or longs[at] != sequence:
                with self._watch(call, deadline) as watch:
                    watch.disagree("ranks made different calls")

    def _wait_long(self, index: int, rank: int, tick: int, call: CollectiveCall, deadline: float) -> None:
        # Read before anything is checked: the sleep below compares against this value, so a tick that comes
        # at any moment from here on ends it at once.
        value = self._words[index]
        # An interrupt sets `board.interrupted` and then wakes what `_sleeps_on` names. Publishing the word
        # first and checking for the interrupt second means that one of the two sees the other.
        self._sleeps_on = self._board.address(rank, TICK)
        try:
            if not futex.reached(value, tick):
                self._board.check_open()
                self._board.sleep(rank, TICK, value)
            if futex.reached(self._words[index], tick):
                return
            with self._watch(call, deadline) as watch:
                while not futex.reached(value := self._words[index], tick):
                    if watch.look():
                        self._board.sleep(rank, TICK, value)
        finally:
            self._sleeps_on = 0

    def wake_sleeper(self) -> None:
        """Wake a thread of this rank that waits for a tick, so that it checks for an interrupt."""
        end = time.monotonic() + _LAST_SECONDS
        # The thread may be between its check and its sleep, where a wake-up is lost: repeat it.
        while (address := self._sleeps_on) and time.monotonic() < end:
            futex.wake(address)
            time.sleep(_WAKE_SECONDS)

    def _watch(self, call: CollectiveCall, deadline: float) -> Watch:
        words, tick = self._words, self._ticks
        waits_for = [rank for index, rank in self._others if not futex.reached(words[index], tick)]
        return Watch(self._board, call.status(waits_for), deadline)


def _area(segment: Tensor, start: int, depth: int, rows: int, width: int) -> Tensor:
    return torch.as_strided(segment, (depth, rows, width), (rows * width, width, 1), start)


def _seconds(action: Callable[[], object]) -> float:
    """Time an action. (timeit's frame would hide the user's line in an error of it.)"""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
