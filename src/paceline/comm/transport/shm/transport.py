"""The shared-memory transport: one segment, mapped by every rank of a host.

Collectives use lane 1 and the window, point-to-point messages use lane 0, so that one can wait while the
other goes on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.calls import Call, Status, call_site, failure_from
from paceline.comm.transport.base import (
    ANY_SOURCE,
    HEADER_BYTES,
    Message,
    Topology,
    Traffic,
    Window,
    memory_of,
)
from paceline.comm.transport.shm.arena import Arena, address_of, map_segment
from paceline.comm.transport.shm.board import Board
from paceline.comm.transport.shm.layout import read_segment
from paceline.comm.transport.shm.messages import HEADER, Incoming, Lane, Outgoing, as_bytes
from paceline.comm.transport.shm.window import ShmWindow
from paceline.comm.transport.watch import Watch, Widen
from paceline.core.errors import GroupInterruptedError
from paceline.core.machine import cores

Step = Callable[[], tuple[bool, bool]]
Waiting = Callable[[], tuple[int, ...]]

_NO_BODY = torch.empty(0, dtype=torch.uint8, device="cpu")


class ShmTransport:
    """A rank's end of the segment behind `fd`, which the caller may close afterwards."""

    @torch.inference_mode(False)  # made once and used in any mode
    def __init__(self, fd: int, rank: int, world_size: int, *, threads: bool = False) -> None:
        layout = read_segment(fd, world_size)
        self.name = "threads" if threads else "shm"
        self.rank = rank
        self.world_size = world_size
        self.topology = Topology((0,) * world_size, (os.uname().nodename,))
        self.traffic = Traffic()
        self._mapping = map_segment(fd, layout.total)
        memory = memoryview(self._mapping)
        segment = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._board = Board(memory, address_of(memory), layout, rank, same_process=threads)
        crowded = world_size > cores()
        spins = 0 if threads else 20 if crowded else 20_000
        self.window: Window | None = ShmWindow(self._board, layout, segment, spins=spins, crowded=crowded)
        self._collective = Lane(memory, layout, self._board, 1)
        self._direct = Lane(memory, layout, self._board, 0)
        self._arena = Arena(memory, self._mapping, layout.arena(rank), layout.arena_bytes)
        self._spins = min(spins, 300)
        self._arriving: dict[int, Incoming] = {}
        self._mailbox: deque[Message] = deque()
        self._mail_lock = threading.Lock()
        self._unfinished: dict[int, deque[Outgoing]] = {}
        self._send_locks = [threading.Lock() for _ in range(world_size)]
        self._closed = False
        self._board.enter()

    @property
    def lanes(self) -> tuple[Lane, Lane]:
        """Of messages and of collectives, for those who wait for more than this transport."""
        return self._direct, self._collective

    @property
    def outlook(self) -> Board:
        """Where the statuses of all ranks can be read."""
        return self._board

    def widen(self, widen: Widen) -> None:
        """These ranks are part of a larger group: waits look around in all of it, under the ranks' numbers
        there."""
        self._board.widen = widen

    def exchange(
        self,
        call: Call,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        deadline: float,
    ) -> None:
        self.traffic.rounds += 1
        advance, waits_for = self.begin(call, sends, receives)
        self._until(advance, self._collective, call, waits_for, deadline)

    def begin(
        self, call: Call, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> tuple[Step, Waiting]:
        """An exchange that goes on whenever its first result is called; the second says for whom it still
        waits."""
        lane = self._collective
        out: dict[int, deque[Outgoing]] = {}
        arriving: dict[int, deque[Incoming]] = {}
        for peer, tensor in sends:
            body = as_bytes(tensor)
            header = memoryview(HEADER.pack(body.numel(), call.sequence, call.signature, 0))
            out.setdefault(peer, deque()).append(Outgoing(peer, header, [body] if body.numel() else []))
            self.traffic.sent += body.numel()
        for peer, tensor in receives:
            body = as_bytes(tensor)
            arriving.setdefault(peer, deque()).append(Incoming(peer, body))
            self.traffic.received += body.numel()
        self.traffic.messages += len(sends)
        self.traffic.headers += len(sends) * HEADER_BYTES
        return lambda: self._advance(lane, call, out, arriving), lambda: tuple({*out, *arriving})

    def _advance(
        self, lane: Lane, call: Call, out: dict[int, deque[Outgoing]], arriving: dict[int, deque[Incoming]]
    ) -> tuple[bool, bool]:
        """One pass over everything under way; (all done, something moved)."""
        moved = False
        for peer, queue in list(out.items()):
            while queue:
                moved |= lane.push(queue[0])
                if not queue[0].done:
                    break
                queue.popleft()
            if not queue:
                del out[peer]
        for peer, queue_in in list(arriving.items()):
            while queue_in:
                transfer = queue_in[0]
                if transfer.have_header < HEADER.size:
                    moved |= lane.pull_header(transfer)
                    if transfer.have_header < HEADER.size:
                        break
                    self._check(call, transfer)
                moved |= lane.pull_body(transfer)
                if not transfer.done:
                    break
                queue_in.popleft()
            if not queue_in:
                del arriving[peer]
        return not out and not arriving, moved

    def _check(self, call: Call, transfer: Incoming) -> None:
        length, sequence, signature, _ = HEADER.unpack(transfer.header)
        if (length, sequence, signature) != (transfer.body.numel(), call.sequence, call.signature):
            status = call.status([transfer.peer])
            with Watch(self._board, status, time.monotonic() + 5) as watch:
                watch.disagree("ranks made different calls")

    def _until(
        self, advance: Step, lane: Lane, call: Call | Status, waits_for: Waiting, deadline: float
    ) -> None:
        """Calls `advance` until it is done, sleeping on the lane's bell when nothing moves."""
        idle, calm = 0, True
        watch: Watch | None = None
        try:
            while True:
                bell = lane.bell()
                if self._board.interrupted is not None:
                    self._board.check_open()
                done, moved = advance()
                if done:
                    return
                if moved:
                    idle, calm = 0, True
                    if watch is not None:
                        watch.reassure()
                    continue
                idle += 1
                if idle <= self._spins:
                    os.sched_yield()
                    continue
                if calm:
                    lane.sleep(bell)
                if watch is None and lane.bell() == bell:
                    watch = Watch(self._board, _status_now(call, waits_for), deadline).__enter__()
                if watch is not None:
                    done, moved = advance()
                    if done:
                        return
                    if not moved:
                        # Who has done its part in the meantime must not count as missing.
                        watch.update(_status_now(call, waits_for))
                        calm = watch.look()
        except BaseException as error:
            if watch is not None:
                watch.__exit__(type(error), error, None)
                watch = None
            raise
        finally:
            if watch is not None:
                watch.__exit__(None, None, None)

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        with self._send_locks[dest]:
            status = Status(f"send(dest_rank={dest}, tag={tag})", call_site(), (dest,))
            advance, settle = self.begin_post(dest, tag, body)
            try:
                self._until(advance, self._direct, status, tuple, deadline)
            except BaseException:
                settle()
                raise

    def begin_post(self, dest: int, tag: int, body: Sequence[memoryview]) -> tuple[Step, Callable[[], None]]:
        """A message that goes on whenever the first result is called. The second gives the message's
        memory back early: what has
        begun still goes out later, ahead of the next message, because half a message would spoil all that
        follow."""
        lane = self._direct
        parts: list[Tensor | memoryview] = [part.cast("B") for part in body if part.nbytes]
        length = sum(len(part) for part in parts)
        transfer = Outgoing(dest, memoryview(HEADER.pack(length, tag, 0, 0)), parts)
        queue = self._unfinished.setdefault(dest, deque())
        queue.append(transfer)
        self.traffic.messages += 1
        self.traffic.sent += length
        self.traffic.headers += HEADER_BYTES

        def advance() -> tuple[bool, bool]:
            moved = False
            while queue:
                moved |= lane.push(queue[0])
                if not queue[0].done:
                    break
                queue.popleft()
            if transfer.done:
                return True, True
            # Two ranks that send to each other at once must both read, or neither would ever finish.
            return False, self._collect() or moved

        def settle() -> None:
            if len(transfer.header) == HEADER.size and queue and queue[-1] is transfer:
                queue.pop()  # nothing of it is on its way
            else:
                transfer.bodies = [
                    memoryview(bytes(part)) for part in transfer.bodies if isinstance(part, memoryview)
                ]

        return advance, settle

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> Message:
        others = tuple(rank for rank in range(self.world_size) if rank != self.rank)
        peers = others if source == ANY_SOURCE else (source,)
        wanted = "any" if source == ANY_SOURCE else source
        text = f"receive(source_rank={wanted}" + (f", tag={tag})" if tag is not None else ")")
        status = Status(text, call_site(), peers, any_of=len(peers) > 1, ends_alone=own_deadline)
        found: list[Message] = []

        def advance() -> tuple[bool, bool]:
            message, moved = self.next_message(source, tag)
            if message is not None:
                found.append(message)
            return message is not None, moved

        self._until(advance, self._direct, status, tuple, deadline)
        self.traffic.received += len(found[0].body)
        return found[0]

    def next_message(self, source: int, tag: int | None) -> tuple[Message | None, bool]:
        """The oldest message that fits, if there is one by now, and whether anything arrived."""
        moved = self._collect()
        with self._mail_lock:
            for index, message in enumerate(self._mailbox):
                if source in (ANY_SOURCE, message.source) and tag in (None, message.tag):
                    del self._mailbox[index]
                    return message, True
        return None, moved

    def _collect(self) -> bool:
        """Moves what has arrived for this rank into its mailbox."""
        lane = self._direct
        moved = False
        with self._mail_lock:
            for peer in range(self.world_size):
                if peer == self.rank:
                    continue
                while True:
                    transfer = self._arriving.get(peer)
                    if transfer is None:
                        transfer = self._arriving[peer] = Incoming(peer, _NO_BODY)
                    if transfer.have_header < HEADER.size:
                        moved |= lane.pull_header(transfer)
                        if transfer.have_header < HEADER.size:
                            break
                        transfer.body = torch.empty(
                            HEADER.unpack(transfer.header)[0], dtype=torch.uint8, device="cpu"
                        )
                    moved |= lane.pull_body(transfer)
                    if not transfer.done:
                        break
                    tag = HEADER.unpack(transfer.header)[1]
                    self._mailbox.append(Message(peer, tag, memory_of(transfer.body)))
                    del self._arriving[peer]
        return moved

    def empty(self, nbytes: int) -> Tensor:
        return self._arena.empty(nbytes)

    def interrupt(self, error: GroupInterruptedError) -> None:
        self._arena.retire()
        self._board.interrupted = error
        self._board.leave(failure_from(error))
        for lane in self.lanes:
            lane.ring_bell(self.rank)
        if isinstance(self.window, ShmWindow):
            self.window.wake_sleeper()

    def close(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._arena.retire()
        if not self._closed:
            self._closed = True
            if self.window is not None:
                # Refers back to the window: the mapping would live until the collector runs.
                self.window.prepared.clear()
            self._board.leave(None if error is None else failure_from(error))


def _status_now(call: Call | Status, waits_for: Waiting) -> Status:
    if isinstance(call, Status):
        return call
    return call.status(waits_for())
