"""Tracebacks without Paceline's own frames: a user looks for the lines of their own code."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from typing import Final, TypeVar

E = TypeVar("E", BaseException, traceback.TracebackException)

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SHOWN_FRAMES: Final = 6


def user_frames_of(error: BaseException) -> str:
    """Return the traceback as text, without Paceline's frames where any others are left."""
    shown = traceback.TracebackException.from_exception(error)
    user_frames(shown)
    return "".join(shown.format())


def user_frames(shown: traceback.TracebackException) -> str:
    """Remove Paceline's own frames from a traceback and from those it was raised from, where any other frame
    is left; return the innermost lines of the user's code, from the deepest cause that has any."""
    innermost = ""
    raised_here = list(chain(shown))
    some = any(_is_users(frame.filename) for item in raised_here for frame in item.stack)
    for item in raised_here:
        users = [frame for frame in item.stack if _is_users(frame.filename)]
        if users:
            innermost = "".join(traceback.StackSummary.from_list(users[-_SHOWN_FRAMES:]).format())
        if some:
            item.stack[:] = users
    return innermost.rstrip()


def chain(error: E | None) -> Iterator[E]:
    """Return an exception, or its traceback, and those that it was raised from, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_users(file: str) -> bool:
    # Errors that a context manager of ours translates pass through contextlib.
    return not file.startswith((_OURS, "<frozen", contextlib.__file__))
