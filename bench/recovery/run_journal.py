"""A run's journal as the benchmarks read it: which steps were committed when, by whom, and what failed.

Follows a journal that grows. Must not know who disturbs the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

from bench.recovery.processes import Family
from bench.recovery.step_log import Line
from paceline.core import journal
from paceline.core.errors import CommTimeoutError, RankFailedError
from paceline.core.events import (
    Event,
    Repaired,
    StepCommitted,
    SupervisorStarted,
    Verdict,
    ViewChanged,
    WorkerFailed,
)

LOOK_SECONDS = 0.004


@final
class RunJournal:
    """Events by kind, in the order they were written; `read` adds what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.commits: list[StepCommitted] = []
        self.views: list[ViewChanged] = []
        self.failures: list[WorkerFailed] = []
        self.repairs: list[Repaired] = []
        self.verdicts: list[Verdict] = []
        self.supervisors: list[SupervisorStarted] = []
        self.count = 0
        self.bytes = 0

    def read(self) -> RunJournal:
        if not self.path.exists():
            return self
        chunk = journal.read(self.path, self.bytes)
        self.bytes = chunk.offset
        self.count += len(chunk.events)
        for event in chunk.events:
            self._keep(event)
        return self

    def _keep(self, event: Event) -> None:
        match event:
            case StepCommitted():
                self.commits.append(event)
            case ViewChanged():
                self.views.append(event)
            case WorkerFailed():
                self.failures.append(event)
            case Repaired():
                self.repairs.append(event)
            case Verdict():
                self.verdicts.append(event)
            case SupervisorStarted():
                self.supervisors.append(event)

    @property
    def step(self) -> int:
        """The newest committed one; 0 when there is none."""
        return self.commits[-1].step if self.commits else 0

    def view_at(self, moment: float) -> ViewChanged:
        """The view that was in force then."""
        return [view for view in self.views if view.time <= moment][-1]

    def wait_until(self, condition: Callable[[RunJournal], bool], family: Family, seconds: float) -> None:
        """Reads on until it holds; an error when the run ends before, or when it takes too long."""
        deadline = time.monotonic() + seconds
        while not condition(self.read()):
            if not family.running():
                raise RankFailedError(
                    f"the run ended with {family.status()} at step {self.step}\n{family.tail()}"
                )
            if time.monotonic() > deadline:
                newest = f"step {self.step}, view {self.views[-1] if self.views else None}"
                raise CommTimeoutError(
                    f"waited {seconds:.0f} s for the run; it is at {newest}\n{family.tail()}"
                )
            time.sleep(LOOK_SECONDS)


@final
class JournalReader:
    """A run of Paceline's for `kill_one`, in the words of the step log: each step once for every member of
    the view that made it."""

    def __init__(self, folder: Path) -> None:
        self._journal = RunJournal(folder / "run" / "journal.jsonl")
        self._final = folder / "run.final.json"
        self._lines: list[Line] = []
        self._done = 0

    def read(self) -> list[Line]:
        commits = self._journal.read().commits
        views = {view.generation: view for view in self._journal.views}
        for commit in commits[self._done :]:
            view = views[commit.generation]
            self._lines += [
                Line(commit.step, commit.time, commit.samples, pid, rank, str(commit.generation))
                for rank, pid in zip(view.members, view.pids, strict=True)
            ]
        self._done = len(commits)
        return self._lines

    def final_hash(self) -> str | None:
        return str(json.loads(self._final.read_text())["hash"]) if self._final.exists() else None
