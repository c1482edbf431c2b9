"""The shared-memory transport: one segment, mapped by every rank of a host.

Collectives use lane 1 and the window, point-to-point messages use lane 0, so that one can wait while the
other continues.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import torch

from paceline.comm.call_status import CollectiveCall, Status, failure_from
from paceline.comm.transport.base import (
    HEADER_BYTES,
    Messages,
    ReceivedMessage,
    Topology,
    Traffic,
    Window,
    as_bytes,
    memory_of,
    peers_of,
    sending_status,
    take_first,
    taking_status,
)
from paceline.comm.transport.shm.arena import Arena, map_segment
from paceline.comm.transport.shm.message_rings import HEADER, Incoming, Lane, Outgoing
from paceline.comm.transport.shm.status_board import StatusBoard
from paceline.comm.transport.shm.window import ShmWindow
from paceline.comm.transport.wait_watch import StatusChannel, Watch
from paceline.core.available_resources import cores
from paceline.core.errors import GroupInterruptedError
from paceline.core.shm_segment_layout import read_segment

AdvanceFunction = Callable[[], tuple[bool, bool]]
Waiting = Callable[[], tuple[int, ...]]

_NO_BODY = torch.empty(0, dtype=torch.uint8, device="cpu")


class ShmTransport:
    """A rank's end of the segment behind `fd`, which the caller may close afterwards."""

    @torch.inference_mode(False)  # made once and used in any mode
    def __init__(
        self,
        fd: int,
        rank: int,
        world_size: int,
        *,
        threads: bool = False,
        labels: Sequence[int] | None = None,
    ) -> None:
        layout = read_segment(fd, world_size)
        self.name = "threads" if threads else "shm"
        self.rank = rank
        self.world_size = world_size
        self.labels: Sequence[int] = range(world_size) if labels is None else labels
        self.topology = Topology((0,) * world_size, (os.uname().nodename,))
        self.traffic = Traffic()
        self._mapping = map_segment(fd, layout.total)
        memory = memoryview(self._mapping)
        segment = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._board = StatusBoard(memory, segment.data_ptr(), layout, rank, self.labels, same_process=threads)
        crowded = world_size > cores()
        spins = 0 if threads else 20 if crowded else 20_000
        self._window = ShmWindow(self._board, layout, segment, spins=spins, crowded=crowded)
        self.window: Window | None = self._window
        self._collective = Lane(memory, layout, self._board, 1)
        self._direct = Lane(memory, layout, self._board, 0)
        # For callers that wait for more than this transport.
        self.lanes = (self._direct, self._collective)
        self._arena = Arena(memory, self._mapping, layout.arena(rank), layout.arena_bytes)
        self.empty, self.posted_status = self._arena.empty, self._board.posted
        self._spins = min(spins, 300)
        self._arriving: dict[int, Incoming] = {}
        self._mailbox: deque[ReceivedMessage] = deque()
        self._mail_lock = threading.Lock()
        self._unfinished: dict[int, deque[Outgoing]] = {}
        self._send_locks = [threading.Lock() for _ in range(world_size)]
        self._closed = False
        self._board.enter()

    def enclose(self, channel: StatusChannel) -> None:
        """Make waits check the status of the enclosing group, of which these ranks are part."""
        self._board.enclosing = channel

    def exchange(self, call: CollectiveCall, sends: Messages, receives: Messages, deadline: float) -> None:
        self.traffic.rounds += 1
        advance, waits_for = self.begin(call, sends, receives)
        self._until(advance, self._collective, lambda: call.status(waits_for()), deadline)

    def begin(
        self, call: CollectiveCall, sends: Messages, receives: Messages
    ) -> tuple[AdvanceFunction, Waiting]:
        """Begin an exchange. The first result moves what can move and returns (all done, something moved);
        the second returns the ranks that the exchange still waits for."""
        lane, check = self._collective, partial(self._check, call)
        out: dict[int, deque[Outgoing]] = {}
        arriving: dict[int, deque[Incoming]] = {}
        for peer, tensor in sends:
            body = as_bytes(tensor)
            size = body.nbytes
            header = memoryview(HEADER.pack(size, call.sequence, call.signature, 0))
            pieces = (header, body) if size else (header,)
            out.setdefault(peer, deque()).append(Outgoing(peer, deque(pieces)))
            self.traffic.sent += size
        for peer, tensor in receives:
            body = as_bytes(tensor)
            arriving.setdefault(peer, deque()).append(Incoming(peer, body))
            self.traffic.received += body.numel()
        self.traffic.messages += len(sends)
        self.traffic.headers += len(sends) * HEADER_BYTES

        def advance() -> tuple[bool, bool]:
            moved = False
            for peer, queue in list(out.items()):
                moved |= lane.push_all(queue)
                if not queue:
                    del out[peer]
            for peer, queue_in in list(arriving.items()):
                while queue_in:
                    moved |= lane.pull(queue_in[0], check)
                    if not queue_in[0].done:
                        break
                    queue_in.popleft()
                if not queue_in:
                    del arriving[peer]
            return not out and not arriving, moved

        return advance, lambda: tuple({*out, *arriving})

    def _check(self, call: CollectiveCall, transfer: Incoming) -> None:
        length, sequence, signature, _ = HEADER.unpack(transfer.header)
        if (length, sequence, signature) != (transfer.body.numel(), call.sequence, call.signature):
            status = call.status([transfer.peer])
            with Watch(self._board, status, time.monotonic() + 5) as watch:
                watch.disagree("ranks made different calls")

    def _until(
        self, advance: AdvanceFunction, lane: Lane, status: Callable[[], Status], deadline: float
    ) -> None:
        """Call `advance` until it is done, sleeping on the lane's bell when nothing moves."""
        idle, calm = 0, True
        watch: Watch | None = None
        with ExitStack() as stack:
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
                    watch = stack.enter_context(Watch(self._board, status(), deadline))
                if watch is not None:
                    done, moved = advance()
                    if done:
                        return
                    if not moved:
                        # A peer that has done its part in the meantime must not count as missing.
                        watch.update(status())
                        calm = watch.look()

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        with self._send_locks[dest]:
            status = sending_status(self.labels, dest, tag)
            length = sum(part.nbytes for part in body)
            header = memoryview(HEADER.pack(length, tag, 0, 0))
            transfer = Outgoing(dest, deque([header, *(part.cast("B") for part in body if part.nbytes)]))
            queue = self._unfinished.setdefault(dest, deque())
            queue.append(transfer)
            self.traffic.messages += 1
            self.traffic.sent += length
            self.traffic.headers += HEADER_BYTES

            def advance() -> tuple[bool, bool]:
                moved = self._direct.push_all(queue)
                if not transfer.pieces:
                    return True, True
                # Two ranks that send to each other at once must both read, or neither would ever finish.
                return False, self._collect() or moved

            try:
                self._until(advance, self._direct, lambda: status, deadline)
            except BaseException:
                # The caller's memory is free from now on. What has begun still goes out later, ahead of the
                # next message, because half a message would spoil all that follow.
                if not transfer.begun and queue and queue[-1] is transfer:
                    queue.pop()  # nothing of it is on its way
                else:
                    parts = [part for part in transfer.pieces if isinstance(part, memoryview)]
                    transfer.pieces = deque(memoryview(bytes(part)) for part in parts)
                raise

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> ReceivedMessage:
        status = taking_status(self, self.labels, source, tag, own_deadline)
        received: list[ReceivedMessage] = []

        def advance() -> tuple[bool, bool]:
            message, moved = self.next_message(source, tag)
            if message is not None:
                received.append(message)
            return message is not None, moved

        self._until(advance, self._direct, lambda: status, deadline)
        self.traffic.received += len(received[0].body)
        return received[0]

    def next_message(self, source: int, tag: int | None) -> tuple[ReceivedMessage | None, bool]:
        """Return the oldest message that fits, if there is one by now, and whether anything arrived."""
        moved = self._collect()
        with self._mail_lock:
            message = take_first(self._mailbox, source, tag)
        return message, moved or message is not None

    def _collect(self) -> bool:
        """Move what has arrived for this rank into its mailbox."""
        moved = False
        with self._mail_lock:
            for peer in peers_of(self):
                while True:
                    transfer = self._arriving.get(peer)
                    if transfer is None:
                        transfer = self._arriving[peer] = Incoming(peer, _NO_BODY)
                    moved |= self._direct.pull(transfer, _make_room)
                    if not transfer.done:
                        break
                    tag = HEADER.unpack(transfer.header)[1]
                    self._mailbox.append(ReceivedMessage(peer, tag, memory_of(transfer.body)))
                    del self._arriving[peer]
        return moved

    def interrupt(self, error: GroupInterruptedError) -> None:
        self._arena.retire()
        self._board.interrupted = error
        self._board.leave(failure_from(error))
        for lane in self.lanes:
            lane.ring_bell(self.rank)
        self._window.wake_sleeper()

    def close(self, error: BaseException | None = None) -> None:
        if error is not None:
            self._arena.retire()
        if not self._closed:
            self._closed = True
            # Refers back to the window: the mapping would live until the collector runs.
            self._window.prepared.clear()
            self._board.leave(None if error is None else failure_from(error))


def _make_room(transfer: Incoming) -> None:
    length = HEADER.unpack(transfer.header)[0]
    transfer.body = torch.empty(length, dtype=torch.uint8, device="cpu")
