"""What a failing rank tells its parent: the traceback as text, and whether it is a cause or an echo.

When one rank fails, the others soon fail because of it. `Standing` orders failures so that an echo never
hides the cause. Must not know how reports travel.
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from paceline.core import own_frames
from paceline.core.errors import CommTimeoutError, DisagreementError, PacelineError, PeerLostError


class Standing(enum.IntEnum):
    """The lower, the more likely a failure is the root cause."""

    CAUSE = 0
    DISAGREEMENT = 1
    WAITED_TOO_LONG = 2
    LOST_A_PEER = 3


@dataclass(frozen=True)
class Report:
    """One rank's failure in words; the exception itself travels beside it where it can be pickled."""

    summary: str
    traceback_text: str
    standing: Standing
    is_ours: bool
    exit_code: str | None
    fault: str = "code"
    users_lines: str = ""  # where in the user's own code it happened


def describe(error: BaseException) -> Report:
    """Turn an exception, caught in a rank, into a report."""
    shown = traceback.TracebackException(type(error), error, _users_frames(error.__traceback__))
    users = "" if isinstance(error, PacelineError) and error.fault == "ours" else own_frames.fold(shown)
    return Report(
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback_text="".join(shown.format()),
        standing=_standing(error),
        is_ours=isinstance(error, PacelineError),
        exit_code=str(error.code) if isinstance(error, SystemExit) else None,
        fault=error.fault if isinstance(error, PacelineError) else "code",
        users_lines=users,
    )


def ended_well(error: SystemExit) -> bool:
    """Whether sys.exit was called the way a successful program calls it."""
    return error.code is None or error.code == 0


def _standing(error: BaseException) -> Standing:
    # Users wrap errors in their own; what they were raised from decides.
    standing = Standing.CAUSE
    for one in _chain(error):
        if isinstance(one, PeerLostError):
            standing = max(standing, Standing.LOST_A_PEER)
        elif isinstance(one, CommTimeoutError):
            standing = max(standing, Standing.WAITED_TOO_LONG)
        elif isinstance(one, DisagreementError):
            standing = max(standing, Standing.DISAGREEMENT)
    return standing


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """Leave out the frames before the user's function; they are marked the way pytest's helpers are."""
    first = frames
    while frames is not None and frames.tb_frame.f_locals.get("__tracebackhide__"):
        frames = frames.tb_next
    return frames or first
