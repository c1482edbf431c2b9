"""Run the fast tests and a short simulation on one mutant, in a process that is forked for it.

A worker process has a copy of `src/` that it may break, and has imported what tests need and no mutant
changes (pytest, hypothesis, torch): a fork of it begins a trial in milliseconds. The mutant is written into
the copy, the forked process imports Paceline from there, and its verdict comes back over a pipe. A mutant
that loops for ever or waits for ever is stopped and is caught. What counts for a loop is the processor time
that the trial used, not the time that passed: a machine that is busy with other work catches no mutant.

Requests and answers are lines of JSON on standard input and output.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import resource
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from pluggy import HookimplMarker

from bench.mutants.reach import Reach
from bench.mutants.targets import SLOW

if TYPE_CHECKING:
    import pytest

hookimpl = HookimplMarker("pytest")

_MOST_MEMORY = 8 * 2**30
_STIR = 0.05
"""Seconds of processor time below which a process only wakes up to look whether it may go on."""
_OPTIONS = "-x -q -p no:cacheprovider --noconftest --import-mode=importlib --tb=line"


class _Plugin:
    """Runs the tests that were chosen, in their order, and keeps the name of the first that failed."""

    def __init__(self, chosen: Sequence[str] | None, reach: Reach | None) -> None:
        self.found = ""
        self._order = None if chosen is None else {name: place for place, name in enumerate(chosen)}
        self._reach = reach

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [one for one in items if one.name not in SLOW]
        order = self._order
        if order is not None:
            items[:] = sorted(
                (one for one in items if one.nodeid in order), key=lambda one: order[one.nodeid]
            )

    @hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with nullcontext() if self._reach is None else self._reach.recorded(item.nodeid):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.found:
            self.found = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.found:
            self.found = f"{report.nodeid} (import)"


def caught_by_tests(
    root: Path, files: Sequence[str], settings: Path, chosen: Sequence[str] | None, reach: Reach | None
) -> str:
    """The first test that fails; empty: all pass. `chosen`: of the tests in these files, only these."""
    import hypothesis
    import pytest

    # The same examples for each mutant and in each run.
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    plugin = _Plugin(chosen, reach)
    paths = [str(root / path) for path in files]
    if chosen is not None:
        needed = {name.partition("::")[0] for name in chosen}
        paths = [str(root / path) for path in files if path in needed]
        if not paths:
            return ""
    problem = io.StringIO()
    with contextlib.redirect_stdout(problem), contextlib.redirect_stderr(problem):
        ended = pytest.main([*_OPTIONS.split(), f"-c{settings}", f"--rootdir={root}", *paths], [plugin])
    # None is there to be run where a mutant renames the cases of a test: nothing has noticed it.
    if ended in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    return plugin.found or f"pytest ended with {ended!r}: {problem.getvalue()[-2000:]}"


def caught_by_simulation(schedules: Sequence[str], reach: Reach | None) -> str:
    """The first promise that one of these schedules ("workers:seed") breaks; empty: none."""
    for schedule in schedules:
        campaign = importlib.import_module("paceline.elastic.simulation.campaign")
        workers, seed = map(int, schedule.split(":"))
        try:
            with nullcontext() if reach is None else reach.recorded(schedule):
                outcome = campaign.run(seed, workers)
        except Exception as error:
            return f"simulation, {workers} workers, seed {seed}: {type(error).__name__}: {error}"
        if outcome.violations:
            return f"simulation, {workers} workers, seed {seed}: {outcome.violations[0]}"
    return ""


class Worker:
    """Tries one mutant after the other in its own copy of the source."""

    def __init__(self, root: Path, copy: Path) -> None:
        self._root = root
        self._copy = copy
        self._settings = copy / "pytest.ini"
        shutil.copytree(root / "src", copy / "src", ignore=shutil.ignore_patterns("*.so.tmp"))
        # As in pyproject.toml, without the options of plugins that a trial does not load.
        markers = "\n    ".join(f"{name}: a marker" for name in ("slow", "netns", "mpi", "cuda", "leaky"))
        self._settings.write_text(f"[pytest]\nfilterwarnings = error\nmarkers =\n    {markers}\n")

    def preload(self, modules: Sequence[str]) -> None:
        """Import what no mutant changes, once for all trials."""
        for name in modules:
            importlib.import_module(name)

    def tried(self, request: dict[str, Any]) -> dict[str, Any]:
        """What became of one mutant; without a path: of the source as it is."""
        path = request.get("path")
        if path is None:
            return self._forked(request)
        target = self._copy / path
        kept = target.read_bytes()
        cached = target.parent / "__pycache__"
        for old in cached.glob(f"{target.stem}.*.pyc"):
            old.unlink()
        target.write_text(request["text"], encoding="utf-8")
        try:
            return self._forked(request)
        finally:
            target.write_bytes(kept)

    def _forked(self, request: dict[str, Any]) -> dict[str, Any]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.close(reading)
            self._child(request, writing)
        os.close(writing)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(child, child)
        problem = b""
        endless = self._endless(child, reading, request["timeout"])
        if endless:
            os.close(reading)
        else:
            with os.fdopen(reading, "rb") as stream:
                problem = stream.read()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if problem:
            answer: dict[str, Any] = json.loads(problem)
            return answer
        return {"by": endless or f"the process ended with {os.waitstatus_to_exitcode(status)}"}

    def _endless(self, child: int, reading: int, limit: float) -> str:
        """Wait for the verdict. Return why there will be none: the trial loops, or it stands still."""
        used, changed_at = 0.0, time.monotonic()
        while not select.select([reading], [], [], 0.25)[0]:
            process, now = psutil.Process(child), time.monotonic()
            times = process.cpu_times()
            busy = times.user + times.system
            if busy > limit:
                return f"no end within {limit:g} s of processor time"
            # Runnable: it would go on if the machine let it.
            if busy - used >= _STIR or process.status() == psutil.STATUS_RUNNING:
                used, changed_at = busy, now
            elif now - changed_at > limit:
                return f"stands still for {limit:g} s"
        return ""

    def _child(self, request: dict[str, Any], writing: int) -> None:
        """Never returns."""
        answer: dict[str, Any] = {"by": "", "error": ""}
        reach = Reach(self._copy) if request.get("reach") else None
        try:
            # Compiled files of what is unchanged are read; a mutant's would outlive it.
            sys.dont_write_bytecode = request.get("path") is not None
            resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
            sys.path[:0] = [str(self._copy / "src"), str(self._root)]
            os.chdir(self._copy)
            os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
            # What a test prints below Python's own streams is not an answer.
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            answer["by"] = caught_by_tests(
                self._root, request["files"], self._settings, request.get("tests"), reach
            ) or caught_by_simulation(request["schedules"], reach)
            self._check_import()
            if reach is not None:
                answer["reach"] = reach.by_function()
        except BaseException:
            answer["error"] = traceback.format_exc()
        with os.fdopen(writing, "wb") as stream:
            stream.write(json.dumps(answer).encode())
        os._exit(0)

    def _check_import(self) -> None:
        """Raise an error where another copy was imported: its verdict says nothing about the mutant."""
        names = {path.stem for path in (self._copy / "src").iterdir()}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name.partition(".")[0] in names and file and not Path(file).is_relative_to(self._copy):
                raise ImportError(f"{name} was imported from {file}")


def main() -> int:
    """Serve trials until standard input ends."""
    root, copy, modules = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    answers = os.fdopen(os.dup(1), "w")
    worker = Worker(root, copy)
    worker.preload(modules)
    for line in sys.stdin:
        answers.write(json.dumps(worker.tried(json.loads(line))) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
