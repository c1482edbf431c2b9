"""The calls of one rank: collectives in their order, point-to-point messages beside them.

Collectives of a group run in one order on every rank: `CallQueue` numbers them, runs them here or in the
background, and remembers a broken group. A synchronous call runs in the caller's thread; as long as
asynchronous ones are under way it queues behind them. Messages in the background keep their order among
sends, and so do receives from one source.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from typing import Any, Generic, TypeVar, final

from torch import Tensor

from paceline.comm.call_status import CollectiveCall, PlannedCall, call_site, on_behalf_of, signature_of
from paceline.comm.collectives.arguments import check_rank, check_timeout
from paceline.comm.collectives.message_encoding import EncodedMessage, decode_message, encode_message
from paceline.comm.collectives.reduction import PreparedReduction
from paceline.comm.transport.base import (
    ANY_SOURCE,
    Interruptible,
    Transport,
    labels_of,
    memory_of,
    tensor_of,
)
from paceline.core.errors import CommTimeoutError, GroupInterruptedError, PacelineError, UsageError

T = TypeVar("T")

_SENDS = -2  # the queue of sends; receives have one per source, ANY_SOURCE among them
_LENGTH_BYTES = 8


class Handle(Generic[T]):
    """An operation under way. A `wait` for its result that times out loses nothing and can be repeated."""

    def __init__(self, future: Future[T], what: str) -> None:
        self._future = future
        self._what = what

    def wait(self, timeout: float | None = None) -> T:
        try:
            return self._future.result(timeout)
        except FutureTimeoutError:
            if self._future.done():
                return self._future.result()  # it came at the last moment, or the operation itself timed out
            raise CommTimeoutError(
                f"{self._what} was still under way after {timeout} s",
                waiting_for=(),
                remedy="wait again, or give it longer",
            ) from None

    def done(self) -> bool:
        return self._future.done()


_TRAFFIC = ("messages", "bytes_sent", "bytes_received", "header_bytes", "bytes_between_hosts", "rounds")


@final
class Pending(Generic[T]):
    """An operation in progress whose result still has to be put in its place, which `wait` does."""

    def __init__(self, handle: Handle[Any], finish: Callable[[Any], T]) -> None:
        self._handle = handle
        self._finish = finish

    def wait(self, timeout: float | None = None) -> T:
        return self._finish(self._handle.wait(timeout))

    def done(self) -> bool:
        return self._handle.done()


def finished(result: Any, finish: Callable[[Any], Any]) -> Any:
    """Return what `finish` makes of a result: now, or when a pending one is waited for."""
    return Pending(result, finish) if isinstance(result, Handle) else finish(result)


@final
class StatsReport(dict[str, Any]):
    """What was counted, as plain data; the totals that are asked for most are attributes too."""

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sent, as they travelled, headers apart."""
        return int(self["total"]["bytes_sent"])

    @property
    def messages_count(self) -> int:
        """Messages that this rank sent."""
        return int(self["total"]["messages"])


class CommunicationStats:
    """Counters of what operations cost, by algorithm. Bytes are payload as it travelled, headers apart."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], dict[str, float]] = {}

    def record(
        self, operation: str, algorithm: str, before: Sequence[int], after: Sequence[int], seconds: float
    ) -> None:
        """Count one call, from two snapshots of the transport's traffic."""
        moved = (new - old for new, old in zip(after, before, strict=True))
        cost = {"calls": 1, **dict(zip(_TRAFFIC, moved, strict=True)), "seconds": seconds}
        tally = self._tallies.setdefault((operation, algorithm), dict.fromkeys(cost, 0))
        for name, amount in cost.items():
            tally[name] += amount

    def report(self) -> StatsReport:
        """Return {"total": {...}, "operations": {"all_reduce": {"ring": {...}}, ...}}."""
        operations: dict[str, dict[str, Any]] = {}
        total = {**dict.fromkeys(("calls", *_TRAFFIC), 0), "seconds": 0.0}
        for (operation, algorithm), tally in sorted(self._tallies.items()):
            operations.setdefault(operation, {})[algorithm or "-"] = _with_bandwidth(tally)
            total = {name: total[name] + amount for name, amount in tally.items()}
        return StatsReport({"total": _with_bandwidth(total), "operations": operations})

    def clear(self) -> None:
        self._tallies.clear()


def _with_bandwidth(tally: Mapping[str, float]) -> dict[str, float]:
    """Add the effective bytes per second: what left and what came, over the time it took."""
    moved, seconds = tally["bytes_sent"] + tally["bytes_received"], tally["seconds"]
    return {**tally, "bandwidth": moved / seconds if seconds > 0 else 0.0}


class CallQueue:
    """Queue of the calls of one context; runs them in order."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport = transport
        self.timeout = timeout
        self.profiling = False
        self.stats = CommunicationStats()
        self.calls = 0  # begun so far: the number of the next one
        self._lock = threading.RLock()
        self._background: ThreadPoolExecutor | None = None
        self._pending = 0
        self._broken: BaseException | None = None
        self._interrupted: GroupInterruptedError | None = None
        self._closed = False

    def run(
        self, planned: PlannedCall[T], timeout: float | None = None, async_op: bool = False
    ) -> T | Handle[T]:
        """Run the call as the next one of this rank: here, or behind those in the background."""
        if timeout is not None:
            check_timeout(timeout)
        if self._pending or async_op:
            handle = self._submit(planned, timeout, in_background=async_op)
            return handle if async_op else handle.wait()
        with self._lock:
            return self._execute(self._call(planned.text), planned, timeout)

    def run_prepared(
        self, prepared: PreparedReduction, data: Tensor, out: Tensor, timeout: float | None
    ) -> Tensor | None:
        """Run a small all-reduce by the short path. None: another call is pending, so `run` has to take
        it."""
        if timeout is not None:
            check_timeout(timeout)
        with self._lock:
            if self._pending or self.profiling:
                return None
            if self._broken is not None or self._closed:
                self.check_open()
            call = CollectiveCall(self.calls, prepared.text, prepared.signature)
            self.calls += 1
            deadline = self.deadline(timeout)
            try:
                prepared.small.run(call, (data,), out, deadline)
            except BaseException as error:
                self._break(error)
                raise
        return out

    def interrupt(self, reason: str) -> None:
        """End the waits of all threads of this rank and every later call with a GroupInterruptedError."""
        if self._closed or self._interrupted is not None:
            return
        rank = labels_of(self.transport)[self.transport.rank]
        error = GroupInterruptedError(f"rank {rank} was taken out of its group: {reason}")
        # No lock: the thread that waits holds it.
        self._broken = self._interrupted = error
        if isinstance(self.transport, Interruptible):
            self.transport.interrupt(error)
        else:
            self.transport.close(error)

    def fail(self, error: PacelineError) -> None:
        """Break the group because of an error of this rank's, which its peers then report."""
        self._break(error)

    def _break(self, error: BaseException) -> None:
        # A collective that ends early leaves ranks at different points: the group cannot continue.
        # A copy has no traceback, which would hold this object, and with it the group's memory, in a circle.
        known = copy.copy(error) if isinstance(error, PacelineError) else error
        self._broken = self._interrupted or known
        self.transport.close(error)
        if (
            self._interrupted is not None
            and isinstance(error, Exception)
            and not isinstance(error, GroupInterruptedError)
        ):
            # It was found on the way out, of what the interruption itself did to the transport.
            raise copy.copy(self._interrupted) from error

    def check_open(self) -> None:
        if self._broken is not None:
            if not isinstance(self._broken, PacelineError):
                raise UsageError(
                    f"this group is broken: an earlier call ended with {type(self._broken).__name__}",
                    remedy="make a new group",
                ) from self._broken
            again = copy.copy(self._broken)
            again.add_note("the group was already broken by an earlier call; this is the error of that call")
            raise again
        if self._closed:
            raise UsageError("this context is closed", remedy="make a new DistributedContext")

    def close(self, error: BaseException | None = None) -> None:
        """End the background thread, after what is under way, and leave the group."""
        if self._closed:
            return
        self._closed = True
        if error is not None:
            self.transport.close(error)
        if self._background is not None:
            self._background.shutdown(wait=True)
        self.transport.close(error)

    def _call(self, text: str, line: str = "", in_background: bool = False) -> CollectiveCall:
        self.check_open()
        call = CollectiveCall(self.calls, text, signature_of(text), line, in_background)
        self.calls += 1
        return call

    def _submit(self, planned: PlannedCall[T], timeout: float | None, *, in_background: bool) -> Handle[T]:
        with self._lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="paceline-collectives")
            # The line is looked up now: in the background there is no caller to be found.
            call = self._call(planned.text, call_site(), in_background)
            self._pending += 1
            future = self._background.submit(self._execute, call, planned, timeout)
        future.add_done_callback(self._one_less)
        return Handle(future, planned.text)

    def _one_less(self, _: Future[Any]) -> None:
        with self._lock:
            self._pending -= 1

    def _execute(self, call: CollectiveCall, planned: PlannedCall[T], timeout: float | None) -> T:
        if self._broken is not None:
            self.check_open()
        deadline = self.deadline(timeout)
        try:
            return self.counted(planned.operation, planned.algorithm, lambda: planned.work(call, deadline))
        except BaseException as error:
            if isinstance(error, UsageError) and self._interrupted is None:
                # Found by every rank alike, from what all ranks have exchanged: the group continues.
                raise
            self._break(error)
            raise

    def counted(self, operation: str, algorithm: str, action: Callable[[], T]) -> T:
        """Run an action, and count it while profiling is on."""
        if not self.profiling:
            return action()
        before, start = self.transport.traffic.snapshot(), time.monotonic()
        result = action()
        after = self.transport.traffic.snapshot()
        self.stats.record(operation, algorithm, before, after, time.monotonic() - start)
        return result

    def deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (self.timeout if timeout is None else timeout)


class PointToPoint:
    """Point-to-point messages of one context."""

    def __init__(self, queue: CallQueue) -> None:
        self._queue = queue
        self._transport = queue.transport
        self._labels = labels_of(queue.transport)
        self._queues: dict[int, ThreadPoolExecutor] = {}

    def send(self, message: Any, dest: int, tag: int, timeout: float | None, async_op: bool) -> Any:
        self._check("dest_rank", dest, tag, timeout)
        what = f"send(dest_rank={self._labels[dest]})"
        encoded = encode_message(message, what)
        if async_op:
            encoded = EncodedMessage(encoded.head, encoded.body.clone())

        def post() -> None:
            head = memoryview(len(encoded.head).to_bytes(_LENGTH_BYTES, "little") + encoded.head)
            parts = (head, memory_of(encoded.body))
            deadline = self._queue.deadline(timeout)
            self._queue.counted("send", "", lambda: self._transport.post(dest, tag, parts, deadline))

        return self._perhaps_later(post, _SENDS, what, async_op)

    def receive(self, source: int, tag: int | None, timeout: float | None, async_op: bool) -> Any:
        if source == ANY_SOURCE and self._transport.world_size == 1:
            raise UsageError(
                "receive() in a group of one rank: there is no rank to send", remedy="start more ranks"
            )
        self._check("source_rank", source, tag, timeout)
        alone = timeout is not None or async_op

        def take() -> Any:
            deadline = self._queue.deadline(timeout)
            message = self._queue.counted(
                "receive", "", lambda: self._transport.take(source, tag, deadline, own_deadline=alone)
            )
            start = _LENGTH_BYTES + int.from_bytes(message.body[:_LENGTH_BYTES], "little")
            return decode_message(message.body[_LENGTH_BYTES:start], tensor_of(message.body[start:]))

        named = "any" if source == ANY_SOURCE else self._labels[source]
        return self._perhaps_later(take, source, f"receive(source_rank={named})", async_op)

    def close(self) -> None:
        """End the threads, after what they have in hand."""
        for queue in self._queues.values():
            queue.shutdown(wait=True)
        self._queues.clear()

    def _check(self, name: str, peer: int, tag: object, timeout: float | None) -> None:
        if peer != ANY_SOURCE or name == "dest_rank":
            check_rank(name, peer, self._transport.world_size)
        if peer == self._transport.rank:
            raise UsageError(f"{name}={peer} is this rank itself", remedy="name another rank")
        number = isinstance(tag, int) and not isinstance(tag, bool) and 0 <= tag < 1 << 31
        if tag is not None and not number:
            raise UsageError(f"tag={tag!r}", remedy="a tag is a whole number from 0 to 2147483647")
        if timeout is not None:
            check_timeout(timeout)
        self._queue.check_open()

    def _perhaps_later(self, action: Callable[[], Any], key: int, what: str, async_op: bool) -> Any:
        if not async_op:
            return action()
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = ThreadPoolExecutor(1, thread_name_prefix="paceline-messages")
        line = call_site()

        def later() -> Any:
            with on_behalf_of(line):
                return action()

        return Handle(queue.submit(later), what)
