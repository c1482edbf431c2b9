"""Point-to-point messages of torch.distributed: a tensor's memory, to one rank or from one or any rank, with
a tag.

Each message is under way in the background from the moment it is asked for: a receive that was posted lets
the sender end, whatever its own rank does meanwhile. Messages to one rank leave in order, and so do receives
of one source and tag. The monitored barrier is made of such messages as well: a rank that is late in it
breaks nothing. As in Gloo, each rank counts its calls: what a late rank sends belongs to its own call, and
neither completes nor releases a later one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import final

from torch import Tensor

from paceline.comm.call_status import call_site, on_behalf_of
from paceline.comm.collectives.arguments import check_rank
from paceline.comm.torch_process_group.background_threads import BackgroundThreads
from paceline.comm.torch_process_group.flat_memory import FlatMemory, describe
from paceline.comm.torch_process_group.work import GroupError, PacelineWork, profiled
from paceline.comm.transport.base import (
    ANY_SOURCE,
    ReceivedMessage,
    Transport,
    labels_of,
    memory_of,
    tensor_of,
)
from paceline.core.errors import CommTimeoutError, PacelineError, PeerError, UsageError
from paceline.core.wording import ranks

# Users' tags are not negative. Each call of the monitored barrier takes two negative ones.
_FIRST_BARRIER_TAG = -2


@final
class TensorMessages:
    """Messages of one group over its transport."""

    def __init__(
        self, transport: Transport, threads: BackgroundThreads, timeout: Callable[[], float]
    ) -> None:
        self._transport = transport
        self._labels = labels_of(transport)
        self._threads = threads
        self._timeout = timeout
        self._barriers = itertools.count()

    def send(self, tensor: Tensor, dest: int, tag: int) -> PacelineWork:
        self._check("dst", dest, tag)
        memory = FlatMemory.of(tensor, "send")
        seconds = self._timeout()

        def action() -> int:
            body = (memory_of(memory.bytes),) if memory.bytes.numel() else ()
            self._transport.post(dest, tag, body, time.monotonic() + seconds)
            return -1

        text = f"send({describe(tensor)}, dst={self._labels[dest]}, tag={tag})"
        return self._start(("send", dest), text, tensor, action, profiled("send", [tensor]))

    def receive(self, tensor: Tensor, source: int, tag: int) -> PacelineWork:
        if source != ANY_SOURCE:
            self._check("src", source, tag)
        memory = FlatMemory.of(tensor, "recv", values=False)
        memory.check_writable("recv")
        seconds = self._timeout()
        named = "any" if source == ANY_SOURCE else str(self._labels[source])
        text = f"recv({describe(tensor)}, src={named}, tag={tag})"

        def action() -> int:
            deadline = time.monotonic() + seconds
            message = self._transport.take(source, tag, deadline, own_deadline=True)
            self._fill(memory, message, text)
            return message.source

        record = profiled("recvAnySource" if source == ANY_SOURCE else "recv", [tensor])
        return self._start(("receive", source, tag), text, tensor, action, record)

    def monitored_barrier(self, seconds: float, all_late: bool) -> None:
        """Return when all ranks are in this call. Rank 0 waits for each rank and names those that are late;
        with `all_late` all of them, else the first."""
        transport, deadline = self._transport, time.monotonic() + seconds
        arrived = _FIRST_BARRIER_TAG - 2 * next(self._barriers)
        released = arrived - 1
        if transport.rank != 0:
            self._follow(arrived, released, seconds)
            return
        if seconds <= 0:
            raise GroupError(
                f"Rank {self._labels[0]} timed out in monitoredBarrier after {seconds * 1000:.0f} ms."
            )
        late: list[int] = []
        for peer in range(1, transport.world_size):
            # Who came in time is not late, even if the wait for another rank took all of it.
            until = max(deadline, time.monotonic() + 0.01)
            try:
                transport.take(peer, arrived, until, own_deadline=True)
            except PacelineError as error:
                late.append(self._labels[peer])
                if not all_late:
                    raise _late(late, seconds) from error
        if late:
            raise _late(late, seconds)
        for peer in range(1, transport.world_size):
            transport.post(peer, released, (), deadline + seconds)

    def _follow(self, arrived: int, released: int, seconds: float) -> None:
        rank, deadline = self._labels[self._transport.rank], time.monotonic() + seconds
        try:
            self._transport.post(0, arrived, (), deadline)
            self._transport.take(0, released, deadline, own_deadline=True)
        except PacelineError as error:
            raise GroupError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank {self._labels[0]}. Please check rank {self._labels[0]} logs for faulty "
                "rank."
            ) from error

    def _start(
        self,
        key: tuple[object, ...],
        text: str,
        tensor: Tensor,
        action: Callable[[], int],
        ended: Callable[[], None],
    ) -> PacelineWork:
        work, line = PacelineWork(text, [tensor]), call_site()

        def later() -> None:
            with on_behalf_of(line):  # what callbacks of its future do, too
                try:
                    source = action()
                    ended()
                except BaseException as error:
                    work.fail(error)
                else:
                    work.finish(source)

        self._threads.submit(key, later)
        return work

    def _fill(self, memory: FlatMemory, message: ReceivedMessage, text: str) -> None:
        target = memory.bytes
        if len(message.body) != target.numel():
            raise PeerError(
                f"{text} at {call_site()}: rank {self._labels[message.source]} sent "
                f"{len(message.body)} bytes, the tensor has {target.numel()}",
                remedy="send and receive tensors of one dtype and one number of elements",
            )
        if target.numel():
            target.copy_(tensor_of(message.body))
        memory.write_back()

    def _check(self, name: str, peer: int, tag: int) -> None:
        check_rank(name, peer, self._transport.world_size)
        if peer == self._transport.rank:
            raise UsageError(f"{name}={self._labels[peer]} is this rank itself", remedy="name another rank")
        if tag < 0:
            raise UsageError(f"tag={tag}", remedy="a tag is a whole number from 0 on")


def _late(late: list[int], seconds: float) -> GroupError:
    named = f"Rank {late[0]}" if len(late) == 1 else f"Ranks {', '.join(map(str, late))}"
    error = CommTimeoutError(
        f"{ranks(late, all_named=True)} did not reach the monitored barrier in {seconds} s",
        waiting_for=tuple(late),
    )
    raised = GroupError(
        f"{named} failed to pass monitoredBarrier in {round(seconds * 1000)} ms",
        remedy="look at that rank's own log, or at where it is",
    )
    raised.__cause__ = error
    return raised
