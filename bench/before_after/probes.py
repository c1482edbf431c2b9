"""Measurements of the checkout on PYTHONPATH: `python probes.py NAME` prints JSON, figure -> seconds, and
`python probes.py forever NAME ...` works until it is killed, for turns.py to measure.

Runs in two checkouts of different age, so it uses public names of `paceline` and functions of `bench` that
both have. Less is better. Figures whose names begin with "calls" or "instructions" are numbers: on a noisy
machine they are the same in every round.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pstats
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

MEGABYTE = 1 << 20
ALL_REDUCE = {"4 KB": 4096, "1 MB": MEGABYTE, "25 MB": 25 * MEGABYTE}
ALL_REDUCE_CALLS = {"4 KB": 200, "1 MB": 40, "25 MB": 5}
ENDLESS = 10_000_000
MANY_WORKERS = 128
SCHEDULES = 250
COUNTED_SCHEDULES = 60
VALGRIND_SCHEDULES = (4, 24)
VALGRIND = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
COUNTED_STEPS = range(100, 300)

Figures = dict[str, float]


def simulate() -> Figures:
    """Seconds of the supervisor's machine under simulated faults, of one process."""
    began = time.perf_counter()
    options = ["--workers", "8", "--schedules", str(SCHEDULES), "--seed", "1", "--json"]
    subprocess.run(
        [sys.executable, "-m", "paceline", "simulate", *options], check=True, stdout=subprocess.DEVNULL
    )
    return {f"{SCHEDULES} simulated schedules": time.perf_counter() - began}


def python_calls() -> Figures:
    """Python calls of a step, and of a simulated schedule."""
    with tempfile.TemporaryDirectory(prefix="paceline-before-") as folder:
        figures = {
            f"calls: step, {workers} workers, {kind}": _calls_a_step(Path(folder, kind), workers)
            for kind, workers in (("not supervised", 1), ("supervised", 2))
        }
        profile = Path(folder, "profile")
        options = ["--workers", "8", "--schedules", str(COUNTED_SCHEDULES), "--seed", "1", "--json"]
        subprocess.run(
            [sys.executable, "-m", "cProfile", "-o", profile, "-m", "paceline", "simulate", *options],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        calls = pstats.Stats(str(profile)).total_calls  # type: ignore[attr-defined]  # absent from typeshed
    return {**figures, "calls: simulated schedule": calls / COUNTED_SCHEDULES}


def instructions() -> Figures:
    """Instructions of a simulated schedule and of the start before the first, which valgrind counts."""
    if shutil.which("valgrind") is None:
        raise SystemExit("instructions are counted by valgrind: apt-get install valgrind")
    few, many = (_instructions(schedules) for schedules in VALGRIND_SCHEDULES)
    each = (many - few) / (VALGRIND_SCHEDULES[1] - VALGRIND_SCHEDULES[0])
    return {
        "instructions: simulated schedule": each,
        "instructions: start of a simulation": few - VALGRIND_SCHEDULES[0] * each,
    }


def _instructions(schedules: int) -> int:
    options = ["--workers", "8", "--schedules", str(schedules), "--seed", "1", "--json"]
    done = subprocess.run(
        [*VALGRIND, sys.executable, "-m", "paceline", "simulate", *options],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return int(done.stderr.partition("Collected :")[2].split()[0])


def _calls_a_step(run_dir: Path, workers: int) -> float:
    import paceline
    from bench.recovery import supervised_run
    from bench.recovery.supervised_run import RunSettings

    steps = COUNTED_STEPS.stop + 10
    settings = RunSettings(str(run_dir), steps, workers=workers, tiny=True, supervised=workers > 1)
    config = supervised_run.config_of(settings)
    objective = CountingObjective(str(run_dir.with_suffix(".calls")))
    trainer = paceline.Trainer(
        supervised_run.build_tiny, objective, optimizer=supervised_run.tiny_optimizer, config=config
    )
    trainer.fit(supervised_run.tiny_data(40 * config.global_batch))
    return float(Path(objective.found).read_text()) / len(COUNTED_STEPS)


class CountingObjective:
    """Cross entropy that counts the calls of its thread from one forward pass to a later one."""

    def __init__(self, found: str) -> None:
        self.found = found
        self._passes = self._calls = 0

    def __call__(self, model, batch):  # type: ignore[no-untyped-def]  # torch is imported by workers
        from torch.nn.functional import cross_entropy

        self._passes += 1
        if self._passes == COUNTED_STEPS.start:
            sys.setprofile(self._count)
        elif self._passes == COUNTED_STEPS.stop:
            sys.setprofile(None)
            Path(self.found).write_text(str(self._calls))
        return cross_entropy(model(batch[0]), batch[1])

    def _count(self, frame: object, event: str, argument: object) -> None:
        self._calls += event in ("call", "c_call")


def start_up() -> Figures:
    """Seconds of `import paceline` and of the command's help, in a fresh interpreter."""
    figures: Figures = {}
    for name, arguments in {
        "import": ["-c", "import paceline"],
        "help": ["-m", "paceline", "--help"],
    }.items():
        times = []
        for _ in range(10):
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - began)
        figures[f"start: {name}"] = min(times)
    return figures


def control_messages() -> Figures:
    """Seconds to encode a control message, and to decode and validate it."""
    # Of this file's checkout, which knows the names of both.
    script = Path(__file__).parents[1] / "control_messages.py"
    figures: Figures = runpy.run_path(str(script))["figures"]()
    return figures


def train(name: str, workers: str, run_dir: str) -> None:
    """Train until the process is killed."""
    from torch import nn

    import paceline
    from bench.train import paceline_loop
    from bench.train.workload import SPEED

    work = next(work for work in SPEED if work.name == name)
    config = paceline_loop._config(work, int(workers), ENDLESS, None, Path(run_dir))
    trainer = paceline.Trainer(work.model(), nn.CrossEntropyLoss(), optimizer=work.optimizer, config=config)
    trainer.fit(work.data(int(workers)))


def many_workers(workers: str, run_dir: str) -> None:
    """Train a tiny model until the process is killed. No shards are reassigned: by how much that changes a
    step is a matter of what else runs on so few cores."""
    from torch import nn

    import paceline
    from bench.recovery import supervised_run
    from bench.recovery.supervised_run import RunSettings

    config = supervised_run.config_of(RunSettings(run_dir, ENDLESS, workers=int(workers), tiny=True))
    waiting = dataclasses.replace(config.fault_tolerance, stragglers="wait")
    trainer = paceline.Trainer(
        supervised_run.build_tiny,
        nn.CrossEntropyLoss(),
        optimizer=supervised_run.tiny_optimizer,
        config=dataclasses.replace(config, fault_tolerance=waiting),
    )
    trainer.fit(supervised_run.tiny_data(40 * config.global_batch))


def all_reduce(ranks: str, path: str) -> None:
    """Reduce until the process is killed; the first rank writes a line of figures after each burst."""
    import paceline

    paceline.spawn(_reduce_forever, path, workers=int(ranks), threads=1)


def _reduce_forever(ctx, path: str) -> None:  # type: ignore[no-untyped-def]  # two checkouts, two types
    while True:
        figures = _timed_reductions(ctx)
        if ctx.rank == 0:
            with Path(path).open("a") as file:
                file.write(json.dumps(figures) + "\n")


def _timed_reductions(ctx) -> Figures:  # type: ignore[no-untyped-def]
    """Return the median seconds from a barrier to the result, by size and form."""
    import torch

    figures: Figures = {}
    for size, nbytes in ALL_REDUCE.items():
        data, out = torch.ones(nbytes // 4), torch.empty(nbytes // 4)
        forms: dict[str, Callable[[], object]] = {
            "returned": lambda data=data: ctx.all_reduce(data),  # type: ignore[misc]
            "out=": lambda data=data, out=out: ctx.all_reduce(data, out=out),  # type: ignore[misc]
        }
        for form, call in forms.items():
            times = []
            for _ in range(ALL_REDUCE_CALLS[size]):
                ctx.barrier()
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
            figures[f"all_reduce {size} {form}"] = median(times)
    return figures


PROBES: dict[str, Callable[[], Figures]] = {
    probe.__name__: probe
    for probe in (
        simulate,
        python_calls,
        instructions,
        start_up,
        control_messages,
    )
}


FOREVER: dict[str, Callable[..., None]] = {
    "train": train,
    "many_workers": many_workers,
    "all_reduce": all_reduce,
}


if __name__ == "__main__":
    if sys.argv[1] == "forever":
        FOREVER[sys.argv[2]](*sys.argv[3:])
    else:
        print(json.dumps(PROBES[sys.argv[1]]()))
