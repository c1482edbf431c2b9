"""What trackers cost: training with TensorBoard and MLflow on against off, and with a tracker that hangs.

Two figures. Steps: in one run, rows are passed to the trackers and kept from them in turns of some seconds,
so that both sides have the same processes and the same machine; the step times of each turn against those
of its neighbours, median and spread. The seconds around a change are left out, because observers see steps
a moment later. Whole runs: `fit` from call to return, off, on and hanging in turns. MLflow is a real server
with SQLite on this machine. It stands for another one: it is scheduled only where a core is idle, and one
core is left to it, so that what is measured is the tracker and not its server. The hanging tracker never
returns from its first row.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

import paceline
from bench.report import Report, Target, main
from bench.train.workload import SEED, SPEED
from paceline.core import events, journal
from paceline.core.wording import counted
from paceline.monitor.trackers.measurements import TrackedRow
from paceline.monitor.trackers.tracker import OpenBackend, Tracker
from paceline.train.callbacks import Observer, RunInfo, SavedCheckpoint
from paceline.train.history import History, StepRecord
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

WORK = SPEED[0]
CORES = len(os.sched_getaffinity(0))
WORKERS = int(os.environ.get("BENCH_WORKERS", max(1, CORES - 1)))
EVERY = 10
LEAST_STEPS = 40  # of a turn, between its margins
LEAST_SECONDS = 2.0  # of a turn
MARGIN_SECONDS = 0.6  # around a change; observers read the journal four times a second
TURNS = int(os.environ.get("BENCH_TURNS", "60"))
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "3"))
WHOLE_STEPS = int(os.environ.get("BENCH_STEPS", "2000"))
LIMIT = 0.01

Trackers = Callable[[Path], list[Tracker]]


class HangingTracker(Tracker):
    """A tracker whose service never answers."""

    def __init__(self) -> None:
        super().__init__(every=EVERY)
        self.released = threading.Event()

    def _plan(self, run: RunInfo) -> OpenBackend:
        return lambda: self

    def write(self, row: TrackedRow) -> None:
        self.released.wait()

    def save(self, saved: SavedCheckpoint) -> None: ...

    def flush(self) -> None: ...

    def end(self, history: History | None) -> None: ...


class Switch(Observer):
    """Passes a run to trackers, its steps in every other turn only; remembers the turns."""

    def __init__(self, trackers: list[Tracker], turn_seconds: float | None) -> None:
        self.trackers, self.turn_seconds = trackers, turn_seconds
        self.changes: list[float] = []
        self.on = turn_seconds is None

    def grad_norm_every(self, config: TrainConfig) -> int:
        return EVERY if self.trackers else 0

    def on_start(self, run: RunInfo) -> None:
        for tracker in self.trackers:
            tracker.on_start(run)

    def on_step(self, record: StepRecord) -> None:
        now = time.time()
        turn = self.turn_seconds
        if turn is not None and (not self.changes or now - self.changes[-1] >= turn):
            self.changes.append(now)
            self.on = not self.on
        for tracker in self.trackers if self.on else ():
            tracker.on_step(record)

    def on_end(self, history: History) -> None:
        for tracker in self.trackers:
            tracker.on_end(history)


@dataclass(frozen=True)
class Run:
    """A finished run: seconds of `fit`, and of processors in the caller's process, where the trackers are."""

    wall: float
    processor: float
    switch: Switch
    steps: list[events.StepCommitted]


def train(folder: Path, make: Trackers, steps: int, turn_seconds: float | None = None) -> Run:
    switch = Switch(make(folder), turn_seconds)
    trainer = paceline.Trainer(
        WORK.model(),
        nn.CrossEntropyLoss(),
        optimizer=WORK.optimizer,
        config=TrainConfig(
            workers=WORKERS,
            global_batch=WORK.batch * WORKERS,
            max_steps=steps,
            seed=SEED,
            threads=1,
            device="cpu",
            progress=False,
            run_dir=str(folder / "run"),
            checkpoint=CheckpointConfig(enabled=False),
        ),
        callbacks=[switch],
    )
    begun, spent = time.perf_counter(), time.process_time()
    trainer.fit(WORK.data(WORKERS))
    wall, processor = time.perf_counter() - begun, time.process_time() - spent
    for tracker in switch.trackers:
        if isinstance(tracker, HangingTracker):
            tracker.released.set()
    found = [
        e for e in journal.iterate(folder / "run" / "journal.jsonl") if isinstance(e, events.StepCommitted)
    ]
    return Run(wall, processor, switch, found)


def turn_ratios(run: Run) -> list[float]:
    """The mean step time of each turn with trackers over that of the turns before and after it."""
    edges = run.switch.changes
    means: list[float | None] = []
    for begun, ended in itertools.pairwise(edges):
        inside = [s.seconds for s in run.steps if begun + MARGIN_SECONDS <= s.time <= ended - MARGIN_SECONDS]
        means.append(statistics.median(inside) if len(inside) > 10 else None)
    ratios = []
    for at in range(2, len(means) - 1, 2):  # the first turn is on, and pays for starts
        before, on, after = means[at - 1], means[at], means[at + 1]
        if before and on and after:
            ratios.append(2 * on / (before + after))
    return ratios


@contextmanager
def mlflow_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="paceline-mlflow-") as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = ["chrt", "--idle", "0", sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/db"]
        with Path(folder, "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        url = f"http://127.0.0.1:{port}"
        try:
            until = time.monotonic() + 200
            while not _answers(url) and server.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
            yield url
        finally:
            os.killpg(server.pid, 9)
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def run() -> Report:
    paceline.MLflow()  # refused here where it is not installed
    report = Report(
        "tracker_cost",
        f"What trackers cost: {WORK.title}, {counted(WORKERS, 'worker')}, a row every {EVERY} steps",
        ("", "off", "on / off, median", "lowest", "highest", "turns"),
    )
    with mlflow_server() as url, tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        kinds: dict[str, Trackers] = {
            "TensorBoard and MLflow": lambda place: [
                paceline.TensorBoard(place / "tb", every=EVERY),
                paceline.MLflow("cost", url, every=EVERY),
            ],
            "a tracker that hangs": lambda place: [HangingTracker()],
        }
        probe = train(Path(folder, "probe"), lambda place: [], 300)
        step = statistics.median(one.seconds for one in probe.steps)
        data: dict[str, list[float]] = {}
        for name, make in kinds.items():
            turn = max(LEAST_SECONDS, 2 * MARGIN_SECONDS + LEAST_STEPS * step)
            done = train(Path(folder, name.replace(" ", "-")), make, int(TURNS * turn / step), turn)
            ratios = data[f"steps: {name}"] = turn_ratios(done)
            _add(report, f"steps, {name}", f"{step * 1e3:.2f} ms", ratios)
        walls: dict[str, list[float]] = {"off": []} | {name: [] for name in kinds}
        processor: dict[str, list[float]] = {name: [] for name in walls}
        for number in range(ROUNDS):
            order = list(walls) if number % 2 == 0 else list(walls)[::-1]
            for name in order:
                make = kinds.get(name, lambda place: [])
                done = train(Path(folder, f"{number}-{name.replace(' ', '-')}"), make, WHOLE_STEPS)
                walls[name].append(done.wall)
                processor[name].append(done.processor)
        off = statistics.median(walls["off"])
        for name in kinds:
            ratios = [one / other for one, other in zip(walls[name], walls["off"], strict=True)]
            data[f"whole: {name}"] = ratios
            _add(report, f"whole fit, {name}", f"{off:.1f} s", ratios)
    for name in kinds:
        value = statistics.median(data[f"steps: {name}"]) - 1
        report.targets.append(
            Target(f"steps with {name}", max(0.0, value) * 100, LIMIT * 100, at_least=False, unit="%")
        )
        more = statistics.median(processor[name]) - statistics.median(processor["off"])
        report.notes.append(
            f"{name}: {more:.2f} s of processor time more in a whole fit; workers do the same as without."
        )
    report.data = {"seconds": walls, "processor seconds": processor, **data}
    report.notes.append("A whole fit waits for the last rows of its trackers; MLflow was imported before.")
    return report


def _add(report: Report, name: str, off: str, ratios: list[float]) -> None:
    middle = f"{statistics.median(ratios):.4f}"
    report.rows.append((name, off, middle, f"{min(ratios):.4f}", f"{max(ratios):.4f}", str(len(ratios))))


if __name__ == "__main__":
    main(run)
