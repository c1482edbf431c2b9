"""One error, one message: a front door raises what went wrong behind it without Paceline's own frames."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from paceline.core.traceback_filter import fold

F = TypeVar("F", bound=Callable[..., Any])


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
