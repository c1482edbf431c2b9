"""Tracebacks without Paceline's own frames: a user looks for the lines of their own code."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Final, TypeVar

from paceline.core.errors import PacelineError

E = TypeVar("E", BaseException, traceback.TracebackException)

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY: Final = os.path.dirname(os.__file__) + os.sep
# Errors of Paceline pass through these on their way to the caller.
_PASSED: Final = (contextlib.__file__, os.path.join(_LIBRARY, "concurrent", ""))
_SHOWN_FRAMES: Final = 6
# How torch calls a module: two frames for each layer that say nothing of it.
_CALLS_OF_MODULES: Final = ("_wrapped_call_impl", "_call_impl")
_MODULE_FILE: Final = os.path.join("torch", "nn", "modules", "module.py")


def fold(error: BaseException) -> None:
    """Remove Paceline's own frames from an error, and from those that it was raised from, before a front door
    raises it again. A bug of Paceline keeps all frames.

    A cause without a line of the user's code says nothing that the error's text does not: it was raised
    inside of Paceline, or in another process, whose lines are in the text. It is moved to `__context__`,
    where Python does not print it.
    """
    if isinstance(error, PacelineError) and error.fault == "ours":
        return
    for one in chain(error):
        _keep_users_frames(one)
    cause = error.__cause__
    if isinstance(error, PacelineError) and cause is not None and not any(map(_shows_users, chain(cause))):
        error.__context__, error.__cause__ = cause, None


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
        users = list[traceback.FrameSummary]()
        for frame in reversed(item.stack):
            if _is_users(frame.filename) and not (users and _calls_a_module(frame.filename, frame.name)):
                users.insert(0, frame)
        if users:
            innermost = "".join(traceback.StackSummary.from_list(users[-_SHOWN_FRAMES:]).format())
        if some:
            item.stack[:] = users
    return innermost.rstrip()


def is_bug(error: BaseException) -> bool:
    """Return whether Paceline raised an error, and not on purpose."""
    frames = _frames(error)
    return bool(frames) and _file(frames[-1]).startswith(_OURS) and not isinstance(error, PacelineError)


def last_place(text: str) -> str:
    """Return where a traceback, as text, ends, in words: " at train.py:12 in forward"; empty: not known."""
    found = re.findall(r'^ *File "(.+)", line (\d+), in (.+)$', text, re.MULTILINE)
    return "" if not found else " at {}:{} in {}".format(*found[-1])


def chain(error: E | None) -> Iterator[E]:
    """Return an exception, or its traceback, and those that it was raised from, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _keep_users_frames(error: BaseException) -> None:
    frames = _frames(error)
    if not frames or is_bug(error):
        return
    users: TracebackType | None = None
    for one in reversed(frames):
        is_call = users is not None and _calls_a_module(_file(one), one.tb_frame.f_code.co_name)
        made = _file(one) == "<string>" and one.tb_frame.f_code.co_name == "__init__"  # by a dataclass
        if _is_users(_file(one)) and not is_call and not made:
            users = TracebackType(users, one.tb_frame, one.tb_lasti, one.tb_lineno)
    error.__traceback__ = users


def _shows_users(error: BaseException) -> bool:
    """Return whether a frame is neither Paceline's nor of Python's own library."""
    files = map(_file, _frames(error))
    return any(_is_users(one) and (not one.startswith(_LIBRARY) or "site-packages" in one) for one in files)


def _frames(error: BaseException) -> list[TracebackType]:
    frames, frame = list[TracebackType](), error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    return frames


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, "<frozen", *_PASSED))


def _calls_a_module(file: str, function: str) -> bool:
    return function in _CALLS_OF_MODULES and file.endswith(_MODULE_FILE)
