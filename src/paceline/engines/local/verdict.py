"""Which rank is to blame, and the error that says so. Pure: from how ranks ended to one exception.

A rank that raised because a peer was lost is an echo; the cause is the earliest failure that is not one.
Must not know processes or sockets.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import PacelineError, PeerLostError, RankFailedError
from paceline.engines.local.report import Report, Standing
from paceline.engines.local.stacks import name_ranks

_OUT_OF_MEMORY = (
    "when nobody sent it by hand this is most often the kernel's out-of-memory killer: look at `dmesg`, use "
    "fewer workers or smaller batches"
)


@dataclass(frozen=True)
class Raised:
    """A rank's code raised."""

    rank: int
    pid: int
    when: float
    report: Report
    error: BaseException | None

    @property
    def standing(self) -> Standing:
        return self.report.standing

    @property
    def summary(self) -> str:
        return self.report.summary


@dataclass(frozen=True)
class Died:
    """A rank's process ended without a word. `status` is an exit code, or a signal's number negated."""

    rank: int
    pid: int
    when: float
    status: int
    had_returned: bool = False
    frames: tuple[str, ...] = ()

    @property
    def standing(self) -> Standing:
        return Standing.CAUSE

    @property
    def summary(self) -> str:
        return f"the process {self.how()}"

    def how(self) -> str:
        if self.status >= 0:
            return f"exited with code {self.status}"
        number = -self.status
        try:
            return f"was killed by signal {number} ({signal.Signals(number).name})"
        except ValueError:
            return f"was killed by signal {number}"


def judge(failures: Sequence[Raised | Died]) -> BaseException:
    """The error to raise for a group in which at least one rank failed."""
    root, *others = sorted(failures, key=lambda failure: (failure.standing, failure.when))
    error = _raised(root) if isinstance(root, Raised) else _died(root)
    for note in _echoes(root, others):
        error.add_note(note)
    return error


def _raised(failure: Raised) -> BaseException:
    report = failure.report
    who = f"rank {failure.rank} (pid {failure.pid})"
    if report.is_ours and isinstance(failure.error, PacelineError):
        # The error itself is shown anyway: of its traceback only what the user wrote, if it came from there.
        lines = report.users_lines or f"\n{report.traceback_text.rstrip()}"
        failure.error.add_note(f"raised on {who}:\n{lines}")
        return failure.error
    if report.exit_code is not None:
        message = f"{who} called sys.exit({report.exit_code})"
        remedy = (
            "end a rank by returning from its function; sys.exit with anything but 0 or None means failure"
        )
    else:
        message, remedy = f"{who} raised {report.summary.splitlines()[0]}", ""
    error = RankFailedError(
        message, rank=failure.rank, traceback_text=report.traceback_text, remedy=remedy, pid=failure.pid
    )
    error.__cause__ = failure.error
    return error


def _died(failure: Died) -> PeerLostError:
    moment = "after its function had returned" if failure.had_returned else "before its function returned"
    message = f"rank {failure.rank} (pid {failure.pid}) {failure.how()} {moment}"
    if failure.frames:
        message += "\n  it was at " + "\n  called from ".join(failure.frames)
    if failure.status == -signal.SIGKILL:
        remedy = _OUT_OF_MEMORY
    elif failure.status < 0:
        remedy = (
            "a signal like this comes from compiled code or from another process: run the rank's code alone"
        )
    else:
        remedy = "look for os._exit or a library that ends the process; return from the function instead"
    return PeerLostError(message, rank=failure.rank, remedy=remedy, pid=failure.pid, status=failure.status)


def _echoes(root: Raised | Died, others: Sequence[Raised | Died]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for failure in others:
        groups.setdefault(failure.summary.splitlines()[0], []).append(failure.rank)
    same = groups.pop(root.summary.splitlines()[0], [])
    notes = [f"{name_ranks(same)} ended the same way"] if same else []
    return notes + [f"{name_ranks(ranks)} also ended: {summary}" for summary, ranks in groups.items()]
