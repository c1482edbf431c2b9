"""A trial in its Ray worker: call the user's function, report by way of the mailbox, leave a value.

What the trial starts ends with it: here where the trial comes to its end; where the worker is killed, by Ray,
which kills the process group that each of its workers leads.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

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
        _take_folder(searched_in)
        return _run_with_output(call, start, attempt, mailbox)
    except Exception as error:
        return {"error": failure_report.describe(error).traceback_text}
    finally:
        ForkedRanks(()).kill_everything()


def _take_folder(searched_in: str) -> None:
    """Work in the search's folder, as on one machine, where this node has it; else in the copy that Ray
    brought along, or where Ray was started."""
    import ray

    if "working_dir" not in ray.get_runtime_context().runtime_env and os.path.isdir(searched_in):
        os.chdir(searched_in)


def _run_with_output(call: TrialCall, start: TrialStart, attempt: int, mailbox: Any) -> dict[str, Any]:
    import ray

    def send(step: int, value: float) -> bool:
        return bool(ray.get(mailbox.report.remote(attempt, step, value, call.waits_for_answers)))

    # On a cluster without a shared file system the folder is the node's own.
    folder = Path(start.folder)
    folder.mkdir(parents=True, exist_ok=True)
    with (
        open(folder / OUTPUT, "a", encoding="utf-8") as output,
        redirect_stdout(output),
        redirect_stderr(output),
    ):
        try:
            return {"value": run_trial(call, start, send)}
        except (TrialResultError, TrialSetupError) as error:
            return {"ends_search": error.message, "remedy": error.remedy, "kind": type(error).__name__}
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            return {"error": failure_report.describe(error).traceback_text}
