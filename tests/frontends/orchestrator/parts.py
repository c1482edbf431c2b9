"""What the tests of the orchestrator share: small trainings, a clock for the loop, who is still alive."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core import events, journal
from paceline.data.permutation import Permutation
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator

SAMPLES = 1200
MOST_SECONDS_HELD_UP = 0.05
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X[:, :1]) + X[:, 1:2]


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


# The sample in the middle of the first epoch, by which a gated net knows that it is there.
MIDDLE = int(Permutation(SAMPLES, 0, 0).take(SAMPLES // 2, SAMPLES // 2 + 1)[0])
_MARK = 50.0
X[MIDDLE, 5] = _MARK


class GatedNet(nn.Module):
    """In the middle of the first epoch it says so, and goes on when it may: time to disturb a training.

    With `pause`, every forward pass from there on, of any worker, goes on after so many seconds by itself."""

    def __init__(self, folder: Path, pause: float | None = None) -> None:
        super().__init__()
        self.inner = small_net()
        self.folder, self.pause = folder, pause

    def forward(self, x: Tensor) -> Any:
        reached = self.folder / "reached"
        holds = bool((x[:, 5] == _MARK).any()) or (self.pause is not None and reached.exists())
        if holds and not (self.folder / "open").exists():
            reached.touch()
            deadline = time.monotonic() + (60.0 if self.pause is None else self.pause)
            while not (self.folder / "open").exists() and time.monotonic() < deadline:
                select.select([], [], [], 0.005)
        return self.inner(x)


class Gate:
    """Builds gated nets in the workers; the test holds the other end."""

    def __init__(self, folder: Path, *, is_open: bool = False, pause: float | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.pause = folder, pause
        if is_open:
            self.open()

    def __call__(self) -> nn.Module:
        return GatedNet(self.folder, self.pause)

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
    processor: on a busy machine that is not the loop's doing."""

    def __init__(self, interval: float) -> None:
        self.longest = 0.0
        self._interval = interval
        self._last, self._waited = time.perf_counter(), _waits_for_a_processor()

    def look(self) -> None:
        """To be called every `interval`."""
        now, waits = time.perf_counter(), _waits_for_a_processor()
        waiting = sum(seconds - self._waited.get(thread, 0.0) for thread, seconds in waits.items())
        self.longest = max(self.longest, now - self._last - self._interval - waiting)
        self._last, self._waited = time.perf_counter(), waits


def _waits_for_a_processor() -> dict[str, float]:
    """By thread, because a thread that ends takes its sum with it."""
    waits = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            waits[thread] = int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            continue
    return waits


@asynccontextmanager
async def ticking(interval: float = 0.005) -> AsyncIterator[Ticks]:
    # Collecting what earlier tests left on the heap takes half a second, and is not the orchestrator's.
    gc.collect()
    gc.freeze()
    ticks = Ticks(interval)

    async def tick() -> None:
        while True:
            await asyncio.sleep(interval)
            ticks.look()

    task = asyncio.create_task(tick())
    try:
        yield ticks
        ticks.look()  # what held it up to the end
    finally:
        task.cancel()
        await asyncio.wait([task])
        gc.unfreeze()


async def fewest_seconds_held_up(work: Callable[[int], Awaitable[None]], rounds: int = 4) -> float:
    """The best of several rounds of the same work, as soon as one is good enough. A call that blocks does so
    in every round; a machine that stands still for a moment does not."""
    best = float("inf")
    for number in range(rounds):
        async with ticking() as ticks:
            await work(number)
        best = min(best, ticks.longest)
        if best < MOST_SECONDS_HELD_UP:
            break
    return best
