"""Probes of two checkouts whose processes are started together and take turns.

From one start to the next, the time of a step or of an all-reduce changes by ten per cent and more: where the
memory of a process lies stays as it is for as long as the process lives, and the machine drifts. Processes of
both checkouts that are alive at once, one of them suspended, share the drift; starting them anew in every
round averages the rest.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import final

from bench.before_after import probes
from bench.recovery.processes import Family
from bench.recovery.steady_state import ENDLESS, Contestant, in_turns
from bench.recovery.supervised_run import RunSettings
from paceline.core.errors import RankFailedError

TURNS = 6
STEPS = 30
BURSTS = 2
LOOK_SECONDS = 0.01
SUPERVISED = {"step, supervised": True, "step, not supervised": False}
TRAIN = {("mlp_1m", 1): 60, ("mlp_1m", 4): 30, ("conv", 2): 15, ("mlp_25m", 2): 6}
RANKS = (2, 4)
MANY_STEPS = 25

Pairs = dict[str, tuple[float, float]]


def steady_state(before: Path, after: Path, turn: int) -> Pairs:
    """Return seconds of a step of 4 workers before and after, with and without a supervisor."""

    def settings(supervised: bool) -> Callable[[Path], list[str]]:
        return lambda run_dir: RunSettings(str(run_dir), ENDLESS, supervised=supervised).command()

    order = _order(before, after, turn)
    return {name: _steps(order, settings(supervised), STEPS) for name, supervised in SUPERVISED.items()}


def train_speed(before: Path, after: Path, turn: int) -> Pairs:
    """Return seconds of a step of exact training before and after, by model and number of workers."""

    def command(model: str, workers: int) -> Callable[[Path], list[str]]:
        return lambda run_dir: _forever("train", model, str(workers), str(run_dir))

    order = _order(before, after, turn)
    return {
        f"train {model}, {workers} workers": _steps(order, command(model, workers), steps)
        for (model, workers), steps in TRAIN.items()
    }


def all_reduce(before: Path, after: Path, turn: int) -> Pairs:
    """Return seconds of an all-reduce before and after, with a result in new memory and in the caller's."""
    pairs: Pairs = {}
    for ranks in RANKS:
        with tempfile.TemporaryDirectory(prefix="paceline-before-") as folder, ExitStack() as stack:
            running = {
                name: _Reductions(ranks, checkout, Path(folder, name), stack)
                for name, checkout in _order(before, after, turn).items()
            }
            for each in range(TURNS):
                for name in list(running) if each % 2 == 0 else reversed(running):
                    running[name].make(BURSTS)
            found = {name: one.figures() for name, one in running.items()}
        for figure, seconds in found["after"].items():
            pairs[f"{figure}, {ranks} ranks"] = found["before"][figure], seconds
    return pairs


def many_workers(before: Path, after: Path, turn: int) -> Pairs:
    """Return seconds of a step of 128 workers before and after, and the processor time of all processes."""
    with tempfile.TemporaryDirectory(prefix="paceline-before-") as folder, ExitStack() as stack:
        running = {
            name: Contestant(
                _forever("many_workers", str(probes.MANY_WORKERS), str(Path(folder, name))),
                Path(folder, name),
                stack,
                environment_of(checkout),
            )
            for name, checkout in _order(before, after, turn).items()
        }
        clock = in_turns(running, TURNS, MANY_STEPS)
        used = {name: one.processor_seconds_a_step() for name, one in running.items()}
    return {
        f"{probes.MANY_WORKERS} workers, step": (clock["before"], clock["after"]),
        f"{probes.MANY_WORKERS} workers, processor time of a step": (used["before"], used["after"]),
    }


TOGETHER: dict[str, Callable[[Path, Path, int], Pairs]] = {
    probe.__name__: probe for probe in (steady_state, train_speed, all_reduce, many_workers)
}


def environment_of(checkout: Path) -> dict[str, str]:
    """Return the variables with which a process imports a checkout's own `paceline` and `bench`."""
    path = os.pathsep.join([str(checkout / "src"), str(checkout)])
    # Without PYTHONSAFEPATH, `python -m` looks into the current folder first.
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def _order(before: Path, after: Path, turn: int) -> dict[str, Path]:
    """Return the checkouts by name; which of them is started first alternates."""
    pairs = [("before", before), ("after", after)]
    return dict(pairs if turn % 2 == 0 else reversed(pairs))


def _steps(order: dict[str, Path], command: Callable[[Path], list[str]], steps: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix="paceline-before-") as folder, ExitStack() as stack:
        running = {
            name: Contestant(command(run_dir), run_dir, stack, environment_of(checkout))
            for name, checkout in order.items()
            for run_dir in [Path(folder, name)]
        }
        found = in_turns(running, TURNS, steps)
    return found["before"], found["after"]


def _forever(*arguments: str) -> list[str]:
    return [sys.executable, probes.__file__, "forever", *arguments]


@final
class _Reductions:
    """Ranks that reduce, and write the figures of each burst of calls into a file."""

    def __init__(self, ranks: int, checkout: Path, path: Path, stack: ExitStack) -> None:
        self._path = path
        self._family = stack.enter_context(Family(path.with_suffix(".log")))
        self._family.start(_forever("all_reduce", str(ranks), str(path)), environment_of(checkout))
        self._bursts: list[dict[str, float]] = []
        self._wait_for(1)
        self._family.suspend()

    def make(self, bursts: int) -> None:
        """Let the ranks run; the burst in which they were suspended does not count."""
        first = len(self._lines())
        self._family.resume()
        self._wait_for(first + 1 + bursts)
        self._family.suspend()
        self._bursts += map(json.loads, self._lines()[first + 1 : first + 1 + bursts])

    def figures(self) -> dict[str, float]:
        """Return the median over all bursts."""
        return {name: median(burst[name] for burst in self._bursts) for name in self._bursts[0]}

    def _lines(self) -> list[str]:
        text = self._path.read_text() if self._path.exists() else ""
        return text.splitlines()[: text.count("\n")]

    def _wait_for(self, lines: int) -> None:
        while len(self._lines()) < lines:
            if not self._family.running():
                raise RankFailedError(f"the ranks ended\n{self._family.tail()}")
            time.sleep(LOOK_SECONDS)
