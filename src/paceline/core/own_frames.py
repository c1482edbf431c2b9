"""Tracebacks without Paceline's own frames: who made the mistake looks for lines that they wrote.

Must not know who prints them.
"""

from __future__ import annotations

import os
import traceback
from typing import Final

_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SHOWN_FRAMES: Final = 6


def folded(error: BaseException) -> str:
    """The traceback as text, without Paceline's frames where any others are left."""
    shown = traceback.TracebackException.from_exception(error)
    fold(shown)
    return "".join(shown.format())


def fold(shown: traceback.TracebackException) -> str:
    """Takes Paceline's own frames out of a traceback and of those it was raised from, where anything else is
    left of them; the innermost lines of the user's, the cause's first."""
    innermost = ""
    one: traceback.TracebackException | None = shown
    seen: set[int] = set()
    raised_here = []
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        raised_here.append(one)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    some = any(_is_users(frame.filename) for item in raised_here for frame in item.stack)
    for item in raised_here:
        users = [frame for frame in item.stack if _is_users(frame.filename)]
        if users:
            innermost = "".join(traceback.StackSummary.from_list(users[-_SHOWN_FRAMES:]).format())
        if some:
            item.stack[:] = users
    return innermost.rstrip()


def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, "<frozen"))
