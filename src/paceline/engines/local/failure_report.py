"""The report of a failing rank: the traceback as text, and whether the failure is a cause or an echo.

When one rank fails, the others soon fail because of it. `FailureRole` orders failures so that an echo never
hides the cause.
"""

from __future__ import annotations

import enum
import traceback
from dataclasses import dataclass
from types import TracebackType

from paceline.core import traceback_filter
from paceline.core.errors import CommTimeoutError, DisagreementError, PacelineError, PeerLostError


class FailureRole(enum.IntEnum):
    """Role of a failure: the lower, the more likely it is the root cause."""

    CAUSE = 0
    DISAGREEMENT = 1
    WAITED_TOO_LONG = 2
    LOST_A_PEER = 3


_ECHOES = {
    DisagreementError: FailureRole.DISAGREEMENT,
    CommTimeoutError: FailureRole.WAITED_TOO_LONG,
    PeerLostError: FailureRole.LOST_A_PEER,
}


@dataclass(frozen=True)
class FailureReport:
    """One rank's failure in words; the exception itself travels beside it where it can be pickled."""

    summary: str
    traceback_text: str
    standing: FailureRole
    is_ours: bool
    exit_code: str | None
    fault: str = "code"
    users_lines: str = ""  # where in the user's code it happened


def describe(error: BaseException) -> FailureReport:
    """Turn an exception, caught in a rank, into a report."""
    shown = traceback.TracebackException(type(error), error, _users_frames(error))
    fault = error.fault if isinstance(error, PacelineError) else "code"
    users = "" if fault == "ours" else traceback_filter.user_frames(shown)
    return FailureReport(
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback_text="".join(shown.format()),
        standing=_standing(error),
        is_ours=isinstance(error, PacelineError),
        exit_code=str(error.code) if isinstance(error, SystemExit) else None,
        fault=fault,
        users_lines=users,
    )


def ended_well(error: SystemExit) -> bool:
    """Return whether sys.exit was called the way a successful program calls it."""
    return error.code is None or error.code == 0


def _standing(error: BaseException) -> FailureRole:
    # Users wrap errors in their own; what they were raised from decides.
    raised = list(traceback_filter.chain(error))
    roles = (role for kind, role in _ECHOES.items() if any(isinstance(one, kind) for one in raised))
    return max(roles, default=FailureRole.CAUSE)


def _users_frames(error: BaseException) -> TracebackType | None:
    """Leave out the frames before the user's function; they are marked the way pytest's helpers are. An error
    in the syntax of a user's file has no other frames."""
    first = frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_locals.get("__tracebackhide__"):
        frames = frames.tb_next
    return frames if isinstance(error, SyntaxError) else frames or first
