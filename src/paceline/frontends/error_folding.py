"""One error, one message: a front door raises what went wrong behind it without Paceline's own frames."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, cast, final

from paceline.core.traceback_filter import fold

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


def folding_errors(function: F) -> F:
    """Decorate a function or a coroutine of a front door: its caller reads the lines of their own
    code alone."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:
            fold(error)
            raise
        except KeyboardInterrupt as error:
            raise error.with_traceback(None) if str(error) else error from None  # text: of a run that saved

    @functools.wraps(function)
    async def call_later(*arguments: Any, **named: Any) -> Any:
        try:
            return await function(*arguments, **named)
        except Exception as error:
            fold(error)
            raise
        except KeyboardInterrupt as error:
            raise error.with_traceback(None) if str(error) else error from None  # text: of a run that saved

    return cast(F, call_later if inspect.iscoroutinefunction(function) else call)


def folding_context(
    function: Callable[P, Iterator[T]],
) -> Callable[P, AbstractContextManager[T]]:
    """Decorate a generator function of a front door as `contextlib.contextmanager` does; errors of its
    block, its beginning and its end have no frames of Paceline."""
    make = contextmanager(function)

    @functools.wraps(function)
    def enter_later(*arguments: P.args, **named: P.kwargs) -> AbstractContextManager[T]:
        return _FoldingContext(make(*arguments, **named))

    return enter_later


@final
class _FoldingContext(AbstractContextManager[T], Generic[T]):
    """A context manager around another one. `contextmanager` restores the traceback of an error that its
    generator lets pass, so that the frames are removed here, after it."""

    def __init__(self, inner: AbstractContextManager[T]) -> None:
        self._inner = inner

    @folding_errors
    def __enter__(self) -> T:
        return self._inner.__enter__()

    @folding_errors
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        handled = self._inner.__exit__(kind, error, trace)
        if isinstance(error, Exception) and not handled:
            fold(error)
        return handled
