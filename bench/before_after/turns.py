"""Probes of two checkouts whose processes are started together and take turns.

From one start to the next, the time of a step or of an all-reduce changes by ten per cent and more: where the
memory of a process lies stays as it is for as long as the process lives, and the machine drifts. Processes of
both checkouts that are alive at once, one of them suspended, share the drift; starting them anew in every
round averages the rest.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import final

from bench.before_after import probes
from bench.recovery import paceline_kills as kills
from bench.recovery.processes import Family
from bench.recovery.run_journal import RunJournal
from bench.recovery.steady_state import (
    ENDLESS,
    RUN_SECONDS,
    START_SECONDS,
    WARMUP_STEPS,
    Contestant,
    in_turns,
)
from bench.recovery.supervised_run import NO_BACKOFF, RunSettings
from paceline.core.errors import RankFailedError

TURNS = 6
STEPS = 30
BURSTS = 2
LOOK_SECONDS = 0.01
SUPERVISED = {"step, supervised": True, "step, not supervised": False}
TRAIN = {("mlp_1m", 1): 60, ("mlp_1m", 4): 30, ("conv", 2): 15, ("mlp_25m", 2): 6}
RANKS = (2, 4)
MANY_STEPS = 25
KILL_TURNS, KILLS_A_TURN = 12, 3
MANY_KILL_TURNS = 4

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


def paceline_kills(before: Path, after: Path, turn: int) -> Pairs:
    """Return seconds from a kill -9 of one of 4 workers to the next step, and to the replacement's first."""
    found = _killed(_order(before, after, turn), 4, KILL_TURNS, KILLS_A_TURN)
    return {
        "kill to next step": (found["before"][0], found["after"][0]),
        "kill to replacement": (found["before"][1], found["after"][1]),
    }


def many_kills(before: Path, after: Path, turn: int) -> Pairs:
    """Return the same of 128 workers that train a tiny model."""
    workers = probes.MANY_WORKERS
    found = _killed(_order(before, after, turn), workers, MANY_KILL_TURNS, 1, tiny=True)
    return {
        f"{workers} workers, kill to next step": (found["before"][0], found["after"][0]),
        f"{workers} workers, kill to replacement": (found["before"][1], found["after"][1]),
        f"{workers} workers, first step": (found["before"][2], found["after"][2]),
    }


TOGETHER: dict[str, Callable[[Path, Path, int], Pairs]] = {
    probe.__name__: probe
    for probe in (steady_state, train_speed, all_reduce, paceline_kills, many_workers, many_kills)
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


def _killed(
    order: dict[str, Path], workers: int, turns: int, kills_a_turn: int, tiny: bool = False
) -> dict[str, tuple[float, float, float]]:
    """Return the medians of next step and replacement, and the seconds from the start to the first step."""
    with tempfile.TemporaryDirectory(prefix="paceline-before-") as folder, ExitStack() as stack:
        running = {
            name: _KilledRun(
                RunSettings(str(Path(folder, name)), ENDLESS, workers=workers, tiny=tiny, backoff=NO_BACKOFF),
                checkout,
                stack,
            )
            for name, checkout in order.items()
        }
        for each in range(turns):
            for name in list(running) if each % 2 == 0 else reversed(running):
                # The same ranks and moments in both checkouts.
                running[name].kill(kills_a_turn, random.Random(each))
        return {name: one.figures() for name, one in running.items()}


def _forever(*arguments: str) -> list[str]:
    return [sys.executable, probes.__file__, "forever", *arguments]


@final
class _KilledRun:
    """A supervised run whose workers are killed when it is its turn."""

    def __init__(self, settings: RunSettings, checkout: Path, stack: ExitStack) -> None:
        self._journal = RunJournal(settings.journal)
        self._family = stack.enter_context(Family(Path(settings.run_dir).with_suffix(".log")))
        self._costs: list[kills.Cost] = []
        began = time.time()
        self._family.start(settings.command(), environment_of(checkout))
        self._journal.wait_until(lambda now: now.step >= WARMUP_STEPS, self._family, START_SECONDS)
        self._first_step = self._journal.commits[0].time - began
        self._family.suspend()

    def kill(self, count: int, dice: random.Random) -> None:
        """Let the run go on, kill a worker at a random moment, wait for its replacement; `count` times."""
        for _ in range(count):
            self._family.resume()
            first = self._journal.read().step
            self._make_steps(first + dice.randint(2, 8))
            time.sleep(dice.uniform(0.0, 0.05))
            killed = kills.kill_one(self._journal.read(), dice)
            self._journal.wait_until(partial(kills.is_back, killed), self._family, RUN_SECONDS)
            self._costs.append(kills.cost(self._journal, killed))
            self._make_steps(self._journal.step + 2)
            self._family.suspend()

    def figures(self) -> tuple[float, float, float]:
        next_step = median(cost.next_step for cost in self._costs)
        return next_step, median(cost.back for cost in self._costs), self._first_step

    def _make_steps(self, step: int) -> None:
        self._journal.wait_until(lambda now: now.step >= step, self._family, RUN_SECONDS)


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
