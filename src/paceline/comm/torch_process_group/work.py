"""Work: an operation of the process group as torch waits for it, and the errors in which it ends.

An operation that was run in the caller's thread is complete from the start; one in the background completes
in the order of its queue. A failure is a GroupError: torch's DistBackendError (a RuntimeError), for code that
was written for torch, and a PacelineError, whose cause says which rank and line it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import DistBackendError, Work

from paceline.comm.torch_process_group.callback_order import Issued, is_of, then_at_once, wait_allowed
from paceline.core.errors import CommTimeoutError, PacelineError, UsageError


class GroupError(PacelineError, DistBackendError):
    """A collective or a message of a torch.distributed group on Paceline failed; `__cause__` says why."""

    fault = "peer"


class NotSupportedError(UsageError, NotImplementedError):
    """Torch has a call that the group cannot serve; torch tells this by a RuntimeError."""


def torch_error(error: BaseException) -> BaseException:
    """Return an error in the form in which code written for torch.distributed expects it."""
    if not isinstance(error, PacelineError) or isinstance(error, GroupError | UsageError):
        return error
    # The body of a DisagreementError lists the calls of all ranks, which `message` does not. Scripts
    # recognise a timeout by Gloo's words.
    late = "Timed out waiting: " if isinstance(error, CommTimeoutError) else ""
    wrapped = GroupError(f"{type(error).__name__}: {late}{error}")
    for note in getattr(error, "__notes__", ()):
        wrapped.add_note(note)
    wrapped.__cause__ = error
    return wrapped


def raise_for_torch(error: PacelineError) -> NoReturn:
    """Raise an error in that form, with itself as the cause."""
    raised = torch_error(error)
    if raised is error:
        raise error
    raise raised from error


def profiler_runs() -> bool:
    return bool(torch._C._autograd._profiler_enabled())


def profiled(operation: str, inputs: Sequence[Tensor]) -> Callable[[], None]:
    """Begin the profiler's record of an operation, `paceline:all_reduce` and so on, and return what ends it,
    in whichever thread; nothing while no profiler runs."""
    if not profiler_runs():
        return _nothing
    shapes = ", ".join(str(list(tensor.shape)) for tensor in inputs)
    record = torch.ops.profiler._record_function_enter_new(f"paceline:{operation}", shapes)
    # Only a future carries the profiler's state into the thread that ends the record.
    ended: torch.futures.Future[None] = torch.futures.Future()
    torch.ops.profiler._call_end_callbacks_on_jit_fut._RecordFunction(record, ended)
    return lambda: ended.set_result(None)


def _nothing() -> None:
    """Do nothing."""


class PacelineWork(Work):
    """One operation. `finish` or `fail` ends it, once; `result` are the tensors that it fills."""

    def __init__(self, text: str, result: Sequence[Tensor], *, done: bool = False) -> None:
        super().__init__()
        self._text = text
        self._tensors = list(result)
        self._error: BaseException | None = None
        self._source = -1
        self._lock = threading.Lock()
        self._ended: threading.Event | None = None
        self._done = done
        self.issued: Issued | None = None  # of a collective
        self._completion: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    def finish(self, source: int = -1) -> None:
        self._source = source
        self._end(None)

    def fail(self, error: BaseException) -> None:
        self._end(torch_error(error))

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._error, self._done = error, True
            ended, completion = self._ended, self._completion
        if ended is not None:
            ended.set()
        if completion is not None:
            completion.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True when the operation is complete; raise its error. A timeout of 0 is none."""
        if not self._done:
            wait_allowed(self.issued)
            ended = self._event()
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            if not ended.wait(seconds if seconds > 0 else None):
                late = CommTimeoutError(
                    f"{self._text} was still under way after {seconds} s",
                    waiting_for=(),
                    remedy="wait again, or give it longer",
                )
                raise torch_error(late)
        if self._error is not None:
            raise self._error
        return True

    def _event(self) -> threading.Event:
        with self._lock:
            if self._ended is None:
                self._ended = threading.Event()
                if self._done:
                    self._ended.set()
            return self._ended

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def source_rank(self) -> int:
        """Return the group rank from which a message of any source came."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the result, a list of tensors."""
        with self._lock:
            if self._future is None:
                # The error of a future is readable for C++ (DDP's reducer waits there) only if a callback
                # raised it: `set_exception` hands C++ the exception object as if it were the result.
                self._completion = torch.futures.Future()
                self._future = then_at_once(self._completion, self._outcome)
                is_of(self._future, self.issued)
                done = self._done
            else:
                done = False
            future, completion = self._future, self._completion
        if done and completion is not None:
            completion.set_result(None)
        return future

    def _outcome(self, _: torch.futures.Future[Any]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors
