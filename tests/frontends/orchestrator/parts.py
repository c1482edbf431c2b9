"""What the tests of the orchestrator share: small trainings, a clock for the loop, who is still alive."""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core import events, journal
from paceline.data.permutation import Permutation
from paceline.frontends.orchestrator import DistributedTrainingOrchestrator

SAMPLES = 1200
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X[:, :1]) + X[:, 1:2]


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


# The sample in the middle of the first epoch, by which a gated net knows that it is there.
MIDDLE = int(Permutation(SAMPLES, 0, 0).take(SAMPLES // 2, SAMPLES // 2 + 1)[0])
_MARK = 50.0
X[MIDDLE, 5] = _MARK


class GatedNet(nn.Module):
    """In the middle of the first epoch it says so, and goes on when it may: time to disturb a training."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = small_net()
        self.folder = folder

    def forward(self, x: Tensor) -> Any:
        if bool((x[:, 5] == _MARK).any()) and not (self.folder / "open").exists():
            (self.folder / "reached").touch()
            deadline = time.monotonic() + 60.0
            while not (self.folder / "open").exists() and time.monotonic() < deadline:
                select.select([], [], [], 0.005)
        return self.inner(x)


class Gate:
    """Builds gated nets in the workers; the test holds the other end."""

    def __init__(self, folder: Path, *, is_open: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        if is_open:
            self.open()

    def __call__(self) -> nn.Module:
        return GatedNet(self.folder)

    def open(self) -> None:
        (self.folder / "open").touch()

    def reached(self) -> bool:
        return (self.folder / "reached").exists()


def small(folder: Path, **given: Any) -> dict[str, Any]:
    """Settings of a training that takes a second."""
    return {"batch_size": 15, "learning_rate": 1e-2, "epochs": 2, "threads": 1, "run_dir": folder, **given}


async def train(orchestrator: DistributedTrainingOrchestrator, settings: Any, **given: Any) -> Any:
    parts: dict[str, Any] = {"model": small_net, "dataset": (X, Y), "objective": nn.MSELoss(), **given}
    return await orchestrator.train_distributed(settings, **parts)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Looks often, without holding the loop up."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def told(folder: Path, kind: type[events.Event]) -> list[Any]:
    return [event for event in journal.iterate(folder / "journal.jsonl") if isinstance(event, kind)]


def applied(folder: Path) -> Counter[tuple[int, int]]:
    """How often every position of every epoch was committed, by the journal."""
    found: Counter[tuple[int, int]] = Counter()
    for event in told(folder, events.StepCommitted):
        found.update((event.epoch, place) for place in range(event.offset, event.offset + event.taken))
    return found


def every_position(samples: int, epochs: int) -> dict[tuple[int, int], int]:
    return {(epoch, place): 1 for epoch in range(epochs) for place in range(samples)}


class Ticks:
    """How long the event loop was held up, at most, less the time that this process had to wait for a
    processor: on a busy machine that is nobody's doing."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.count = 0


def _waited_for_a_processor() -> float:
    total = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            total += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1])
        except (OSError, IndexError, ValueError):
            continue
    return total / 1e9


@asynccontextmanager
async def ticking(interval: float = 0.005) -> AsyncIterator[Ticks]:
    ticks = Ticks()

    async def tick() -> None:
        last, waited = time.perf_counter(), _waited_for_a_processor()
        while True:
            await asyncio.sleep(interval)
            now, waiting = time.perf_counter(), _waited_for_a_processor()
            ticks.longest = max(ticks.longest, now - last - interval - max(0.0, waiting - waited))
            ticks.count += 1
            last, waited = time.perf_counter(), waiting

    task = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()
        await asyncio.wait([task])
