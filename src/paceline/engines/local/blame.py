"""Find the rank that caused a failure, and make its error. Pure: from how ranks ended to one exception.

A rank that raised because a peer was lost is an echo; the cause is the earliest failure that is not one.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import PacelineError, PeerLostError, RankFailedError
from paceline.core.wording import ranks
from paceline.engines.local import memfd_pickle
from paceline.engines.local.failure_report import FailureReport, FailureRole

_OUT_OF_MEMORY = (
    "unless a person sent it, this is most often the kernel's out-of-memory killer: look at `dmesg`, use "
    "fewer workers or smaller batches"
)


@dataclass(frozen=True)
class RankRaised:
    """A rank's code raised."""

    rank: int
    pid: int
    when: float
    report: FailureReport
    error: BaseException | None

    @staticmethod
    def load(
        rank: int, pid: int, when: float, files: Sequence[int], classes: Sequence[type] = ()
    ) -> RankRaised:
        """Read what a rank sent of its failure: the report, and the exception where it could be pickled."""
        error: BaseException | None = None
        if len(files) > 1:
            # Exceptions whose constructor wants other arguments than it stores cannot be rebuilt; the text
            # remains.
            with contextlib.suppress(Exception):
                error = memfd_pickle.load(files[1], shared=classes)
        return RankRaised(rank, pid, when, memfd_pickle.load(files[0]), error)

    @property
    def standing(self) -> FailureRole:
        return self.report.standing

    @property
    def summary(self) -> str:
        return self.report.summary


@dataclass(frozen=True)
class RankDied:
    """A rank's process ended without a report. `status` is an exit code, or a signal's number negated."""

    rank: int
    pid: int
    when: float
    status: int
    had_returned: bool = False
    frames: tuple[str, ...] = ()

    @property
    def standing(self) -> FailureRole:
        return FailureRole.CAUSE

    @property
    def summary(self) -> str:
        return f"the process {how_ended(self.status)}"


def how_ended(status: int) -> str:
    """Describe an exit status: "exited with code 1", "was killed by signal 9 (SIGKILL)"."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by signal {-status} ({signal.Signals(-status).name})"
    except ValueError:
        return f"was killed by signal {-status}"


def root_cause(failures: Sequence[RankRaised | RankDied]) -> BaseException:
    """Return the error to raise for a group in which at least one rank failed."""
    root, *others = sorted(failures, key=lambda failure: (failure.standing, failure.when))
    error = _raised(root) if isinstance(root, RankRaised) else _died(root)
    for note in _echoes(root, others):
        error.add_note(note)
    return error


def _raised(failure: RankRaised) -> BaseException:
    report = failure.report
    who = f"rank {failure.rank} (pid {failure.pid})"
    if report.is_ours and isinstance(failure.error, PacelineError):
        # The error itself is shown anyway: of its traceback only what the user wrote, and of a bug all of it.
        bug = f"\n{report.traceback_text.rstrip()}" if report.fault == "ours" else ""
        lines = report.users_lines or bug
        failure.error.add_note(f"raised on {who}" + (f":\n{lines}" if lines else ""))
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


def _died(failure: RankDied) -> PeerLostError:
    moment = "after its function had returned" if failure.had_returned else "before its function returned"
    message = f"rank {failure.rank} (pid {failure.pid}) {how_ended(failure.status)} {moment}"
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


def _echoes(root: RankRaised | RankDied, others: Sequence[RankRaised | RankDied]) -> list[str]:
    groups: dict[str, list[int]] = {}
    for failure in others:
        groups.setdefault(failure.summary.splitlines()[0], []).append(failure.rank)
    same = groups.pop(root.summary.splitlines()[0], [])
    notes = [f"{ranks(same)} ended the same way"] if same else []
    # Each rank is named: their logs say more, and the note is the only place that says whose.
    return notes + [
        f"{ranks(numbers, all_named=True)} also ended: {summary}" for summary, numbers in groups.items()
    ]
