"""A trial in its Ray worker: call the user's function, report by way of the mailbox, leave a value.

What the trial starts ends with it: here where the trial comes to its end; where the worker is killed, by Ray,
which since 2.57 kills the process group that each of its workers leads.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, final

from paceline.core.host import host_name
from paceline.engines.local import failure_report, linux
from paceline.engines.local.fork_server import ForkedRanks
from paceline.frontends.tuner.trial_engine import TrialCall, TrialStart
from paceline.frontends.tuner.trial_process import run_trial
from paceline.frontends.tuner.trial_record import OUTPUT
from paceline.frontends.tuner.trial_value import TrialResultError, TrialSetupError


@final
@dataclass(frozen=True)
class MailedReport:
    """A report in the mailbox. `ticket` counts reports; `attempt` counts the trials that were started."""

    ticket: int
    attempt: int
    step: int
    value: float


@final
class Mailbox:
    """Reports on their way to the search, and answers on their way back; an asynchronous actor."""

    def __init__(self) -> None:
        self._reports: list[MailedReport] = []
        self._answers: dict[int, asyncio.Future[bool]] = {}
        self._count = 0
        self._arrived = asyncio.Event()

    async def report(self, attempt: int, step: int, value: float, waits: bool) -> bool:
        """Leave a report of a trial; wait for its answer where it needs one."""
        self._count += 1
        ticket = self._count
        self._reports.append(MailedReport(ticket, attempt, step, value))
        self._arrived.set()
        if not waits:
            return False
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        return await answer

    async def reports_after(self, ticket: int, wait: bool) -> list[MailedReport]:
        """Return the reports after this one, which is known; `wait` until there is one."""
        self._reports = [one for one in self._reports if one.ticket > ticket]
        while wait and not self._reports:
            self._arrived.clear()
            await self._arrived.wait()
            self._reports = [one for one in self._reports if one.ticket > ticket]
        return list(self._reports)

    async def answer(self, ticket: int, prune: bool) -> None:
        """Answer a report."""
        waiting = self._answers.pop(ticket, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(prune)


def run_on_ray(
    call: TrialCall, start: TrialStart, attempt: int, mailbox: Any, searched_in: str
) -> dict[str, Any]:
    """Run one trial in this Ray worker, which ends with it; return its value, or how it failed, as plain
    data. `searched_in`: the folder of the search."""
    # None of what the trial starts can slip away, as below a fork server.
    linux.adopt_orphans()
    try:
        return _run_here(call, start, attempt, mailbox, searched_in)
    except (TrialResultError, TrialSetupError) as error:
        return {"ends_search": error.message, "remedy": error.remedy, "kind": type(error).__name__}
    except KeyboardInterrupt:
        raise  # by which Ray cancels a task
    except BaseException as error:
        return {"error": failure_report.describe(error).traceback_text}
    finally:
        ForkedRanks(()).kill_everything()


def folders_below(here: Path, start: TrialStart, searched_in: str) -> TrialStart:
    """Return a start whose folders, where they are below that of the search, are below `here` instead."""

    def moved(folder: str) -> str:
        below = os.path.relpath(folder, searched_in) if folder else os.pardir
        return folder if below.split(os.sep)[0] == os.pardir else str(here / below)

    return replace(start, folder=moved(start.folder), parent_folder=moved(start.parent_folder))


def _run_here(
    call: TrialCall, start: TrialStart, attempt: int, mailbox: Any, searched_in: str
) -> dict[str, Any]:
    import ray

    def send(step: int, value: float) -> bool:
        return bool(ray.get(mailbox.report.remote(attempt, step, value, call.waits_for_answers)))

    try:
        start = _take_folder(start, searched_in)
        output = _open_output(Path(start.folder))
    except OSError as error:
        raise TrialSetupError(
            f"trial {start.number} cannot have the folder {start.folder} on {host_name()}: {error.strerror}",
            remedy="search in a folder that all nodes can write under the same path, or start Ray on the "
            "nodes in a folder that its user can write",
        ) from error
    with output, redirect_stdout(output), redirect_stderr(output):
        return {"value": run_trial(call, start, send)}


def _take_folder(start: TrialStart, searched_in: str) -> TrialStart:
    """Work in the search's folder, as on one machine, where this node has it; else in the copy that Ray
    brought along, or where Ray was started, with the trial's folder below."""
    import ray

    is_here = os.path.isdir(searched_in) and os.access(searched_in, os.X_OK)
    if is_here and "working_dir" not in ray.get_runtime_context().runtime_env:
        os.chdir(searched_in)
    return start if is_here else folders_below(Path.cwd(), start, searched_in)


def _open_output(folder: Path) -> TextIO:
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / OUTPUT, "a", encoding="utf-8")
