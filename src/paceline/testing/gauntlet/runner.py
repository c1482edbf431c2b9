"""Many runs of the gauntlet in parallel processes, each of which runs one plan after the other.

A run that does not end is a finding like any other: its process is ended, and another takes its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, final

from paceline.testing.gauntlet.attempt import AttemptResult, Gauntlet

# A run takes seconds; a first one also warms the process up. Longer is a hang, which is a finding.
RUN_SECONDS = 180.0
_WORKER = ("-m", "paceline.testing.gauntlet", "--worker")


@final
class _AttemptWorker:
    """One process of the campaign, and what it runs now."""

    def __init__(self, keep: Path) -> None:
        self._keep = keep
        self._process = self._start()
        self.task: tuple[str, int] | None = None
        self._since = 0.0

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *_WORKER, "--keep", str(self._keep)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    @property
    def answers(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def begin(self, task: tuple[str, int]) -> None:
        self.task, self._since = task, time.monotonic()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()

    def finish(self) -> AttemptResult:
        """Return the run's result, once `answers` can be read."""
        assert self.task is not None
        line = self.answers.readline()
        if line:
            self.task = None
            return AttemptResult.from_json(line)
        return self._fail(f"the process of the gauntlet ended with {self._process.wait()}")

    def overdue(self) -> AttemptResult | None:
        if self.task is None or time.monotonic() - self._since < RUN_SECONDS:
            return None
        return self._fail(f"the run did not end within {RUN_SECONDS:.0f} s")

    def _fail(self, wrong: str) -> AttemptResult:
        assert self.task is not None
        (feature, seed), self.task = self.task, None
        self.close()
        self._process = self._start()
        return AttemptResult(feature, seed, "", wrong, seconds=time.monotonic() - self._since)

    def close(self) -> None:
        """End the process and what it started."""
        with self._process, contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)


def run(tasks: Sequence[tuple[str, int]], jobs: int, keep: Path) -> Generator[AttemptResult, None, None]:
    """Yield the results of all plans as they complete, from `jobs` processes at a time."""
    waiting = list(reversed(tasks))
    runners = [_AttemptWorker(keep) for _ in range(min(jobs, len(tasks)))]
    try:
        while waiting or any(runner.task for runner in runners):
            for runner in runners:
                if runner.task is None and waiting:
                    runner.begin(waiting.pop())
            busy = {runner.answers: runner for runner in runners if runner.task is not None}
            ready, _, _ = select.select(list(busy), [], [], 1.0)
            for answers in ready:
                yield busy[answers].finish()
            for runner in runners:
                late = runner.overdue()
                if late is not None:
                    yield late
    finally:
        for runner in runners:
            runner.close()


def serve(keep: Path) -> None:
    """Serve as one process of the campaign: a task per line of input, a finding per line of output."""
    gauntlet = Gauntlet(keep)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a run prints is no finding
    for line in sys.stdin:
        feature, seed = json.loads(line)
        out.write(gauntlet.attempt(feature, seed).to_json() + "\n")
        out.flush()


def table(findings: Sequence[AttemptResult]) -> list[str]:
    """Return a table of the results, by feature."""
    by_feature: dict[str, list[AttemptResult]] = defaultdict(list)
    for finding in findings:
        by_feature[finding.feature].append(finding)
    head = f"{'feature':32} {'runs':>5} {'disturbed':>9} {'workers lost':>12} {'transfers':>9} {'wrong':>5}"
    lines = [head, "-" * len(head)]
    for feature, found in [*sorted(by_feature.items()), ("all", list(findings))]:
        met: Counter[str] = Counter()
        for finding in found:
            met.update(finding.met)
        lines.append(
            f"{feature:32} {len(found):5} {sum(map(disturbed, found)):9} {met['workers lost']:12} "
            f"{met['state transfers']:9} {sum(bool(finding.wrong) for finding in found):5}"
        )
    return lines


def disturbed(finding: AttemptResult) -> bool:
    """Return whether at least one failure was really injected."""
    return any(count for name, count in finding.met.items() if name not in ("views", "state transfers"))
