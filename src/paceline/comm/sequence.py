"""The order of calls on one rank: numbers them, runs them here or in the background, and remembers when the
group is broken.

Collectives of a group run in one order on every rank. A synchronous call runs in the caller's thread; as
long as asynchronous ones are under way it queues behind them. Knows nothing of what a call does.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeoutError
from typing import Any, Generic, TypeVar

from torch import Tensor

from paceline.comm.arguments import check_timeout
from paceline.comm.calls import Call, call_site, signature_of
from paceline.comm.reduction import Prepared
from paceline.comm.stats import CommunicationStats
from paceline.comm.transport.base import Interruptible, Transport
from paceline.core.errors import CommTimeoutError, GroupInterruptedError, PacelineError, UsageError

T = TypeVar("T")
Work = Callable[[Call, float], T]


class Handle(Generic[T]):
    """An operation under way. `wait` returns its result; a wait that times out loses nothing and can be
    repeated."""

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


def _repeated(error: PacelineError) -> PacelineError:
    again = copy.copy(error)
    again.add_note("the group was already broken by an earlier call; this is the error of that call")
    return again


class Sequence:
    """Makes and runs the calls of one context."""

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.transport = transport
        self.timeout = timeout
        self.profiling = False
        self.stats = CommunicationStats()
        self._next = 0
        self._lock = threading.RLock()
        self._background: ThreadPoolExecutor | None = None
        self._pending = 0
        self._broken: BaseException | None = None
        self._interrupted: GroupInterruptedError | None = None
        self._closed = False

    def run(
        self,
        operation: str,
        text: str,
        work: Work[T],
        *,
        algorithm: str = "",
        timeout: float | None = None,
        async_op: bool = False,
    ) -> T | Handle[T]:
        """Runs `work(call, deadline)` as the next call of this rank."""
        if timeout is not None:
            check_timeout(timeout)
        if self._pending or async_op:
            handle = self._submit(operation, text, work, algorithm, timeout, in_background=async_op)
            return handle if async_op else handle.wait()
        with self._lock:
            return self._execute(self._call(text), operation, work, algorithm, timeout)

    def run_prepared(
        self, prepared: Prepared, data: Tensor, out: Tensor, timeout: float | None
    ) -> Tensor | None:
        """The short way of `run` for small all-reduces; None: something is under way, take the long way."""
        if timeout is not None:
            check_timeout(timeout)
        with self._lock:
            if self._pending or self.profiling:
                return None
            if self._broken is not None or self._closed:
                self.check_open()
            call = Call(self._next, prepared.text, prepared.signature)
            self._next += 1
            deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
            try:
                prepared.small.run(call, (data,), out, deadline)
            except BaseException as error:
                self._break(error)
                raise
        return out

    def interrupt(self, reason: str) -> None:
        """Ends the waits of all threads of this rank and every later call with a GroupInterruptedError."""
        if self._closed or self._interrupted is not None:
            return
        error = GroupInterruptedError(f"rank {self.transport.rank} was taken out of its group: {reason}")
        # No lock: whoever waits holds it.
        self._broken = self._interrupted = error
        if isinstance(self.transport, Interruptible):
            self.transport.interrupt(error)
        else:
            self.transport.close(error)

    def _break(self, error: BaseException) -> None:
        # A collective that ends early leaves ranks at different points: the group cannot go on.
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
            raise _repeated(self._broken)
        if self._closed:
            raise UsageError("this context is closed", remedy="make a new DistributedContext")

    def close(self, error: BaseException | None = None) -> None:
        """Ends the background thread, after what is under way, and leaves the group."""
        if self._closed:
            return
        self._closed = True
        if error is not None:
            self.transport.close(error)
        if self._background is not None:
            self._background.shutdown(wait=True)
        self.transport.close(error)

    def _call(self, text: str, line: str = "", in_background: bool = False) -> Call:
        self.check_open()
        call = Call(self._next, text, signature_of(text), line, in_background)
        self._next += 1
        return call

    def _submit(
        self,
        operation: str,
        text: str,
        work: Work[T],
        algorithm: str,
        timeout: float | None,
        *,
        in_background: bool,
    ) -> Handle[T]:
        with self._lock:
            if self._background is None:
                self._background = ThreadPoolExecutor(1, thread_name_prefix="paceline-collectives")
            # The line is looked up now: in the background there is no caller to be found.
            call = self._call(text, call_site(), in_background)
            self._pending += 1
            future = self._background.submit(self._execute, call, operation, work, algorithm, timeout)
        future.add_done_callback(self._one_less)
        return Handle(future, text)

    def _one_less(self, _: Future[Any]) -> None:
        with self._lock:
            self._pending -= 1

    def _execute(self, call: Call, operation: str, work: Work[T], algorithm: str, timeout: float | None) -> T:
        if self._broken is not None:
            self.check_open()
        start = time.monotonic()
        before = self.transport.traffic.snapshot() if self.profiling else ()
        try:
            result = work(call, start + (self.timeout if timeout is None else timeout))
        except BaseException as error:
            if isinstance(error, UsageError) and self._interrupted is None:
                # Found by every rank alike, from what all have told each other: the group goes on.
                raise
            self._break(error)
            raise
        if self.profiling:
            self.stats.record(
                operation, algorithm, before, self.transport.traffic.snapshot(), time.monotonic() - start
            )
        return result
