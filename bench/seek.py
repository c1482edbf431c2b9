"""Resuming in the middle of an epoch: how long until the ids of the first batch are known, and what it takes.

Beside it torch's own sampler, which lays the whole order out and has to be read up to the position; at a
hundred million samples its Python objects need several gigabytes, so it is left out there.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sized
from itertools import islice
from statistics import median

import torch.utils.data as torch_data

from bench.report import Report, Series, Target, main
from paceline.data.permutation import Permutation
from paceline.data.sampler import DistributedSampler

CLAIMED = 10**8
SIZES = (10**5, 10**6, 10**7, CLAIMED, 10**12)
LARGEST_FOR_TORCH = 10**7
REPLICAS = 4
BATCH = 64
TRIES = 15
READS = 20_000


class Numbers(torch_data.Dataset[int]):
    """A dataset of any size: sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def resumed(dataset: Numbers, state: dict[str, object]) -> list[int]:
    """A new sampler goes on from the state: the first batch's ids, as a DataLoader asks for them."""
    sampler = DistributedSampler(dataset, REPLICAS, 1, seed=1)
    sampler.load_state_dict(state)
    sampler.set_epoch(sampler.epoch)
    return next(iter(torch_data.BatchSampler(sampler, BATCH, drop_last=False)))


def skipped(dataset: Numbers, position: int) -> list[int]:
    """What resuming takes with torch's sampler."""
    sampler: torch_data.DistributedSampler[int] = torch_data.DistributedSampler(dataset, REPLICAS, 1, seed=1)
    sampler.set_epoch(3)
    return list(islice(sampler, position // REPLICAS, position // REPLICAS + BATCH))


def run() -> Report:
    """Seconds before the first batch is read, resuming in the middle of an epoch."""
    columns = ("samples", "median, ms", "worst, ms", "memory, KB", "torch's sampler, ms", "its memory, KB")
    report = Report("seek", f"Resuming in the middle of an epoch ({REPLICAS} replicas)", columns)
    report.x_label, report.y_label = "samples in the epoch", "ms until the first batch's ids"
    medians, peers = [], []
    for size in SIZES:
        dataset = Numbers(size)
        fresh = DistributedSampler(dataset, REPLICAS, 1, seed=1).state_dict()
        state = fresh | {"epoch": 3, "position": size // 2}

        def ours(dataset: Numbers = dataset, state: dict[str, object] = state) -> Sized:
            return resumed(dataset, state)

        def theirs(dataset: Numbers = dataset, position: int = size // 2) -> Sized:
            return skipped(dataset, position)

        times = _times(ours, TRIES)
        medians.append(median(times))
        row = [f"{size:.0e}", f"{median(times):.2f}", f"{max(times):.2f}", f"{_peak(ours):.0f}"]
        if size <= LARGEST_FOR_TORCH:
            peers.append(median(_times(theirs, 3)))
            row += [f"{peers[-1]:.0f}", f"{_peak(theirs):.0f}"]
        report.rows.append((*row, "", "")[: len(columns)])
        if size == CLAIMED:
            what = f"resume in the middle of {size:.0e} samples, worst of {TRIES}"
            report.targets.append(Target(what, max(times) / 1e3, 0.1, at_least=False, unit=" s"))
    report.series.append(Series("Paceline", SIZES, medians))
    report.series.append(Series("torch's DistributedSampler", SIZES[: len(peers)], peers))
    report.notes.append(f"read in order: {_reading():.2f} us per {BATCH} ids of {CLAIMED:.0e}")
    return report


def _times(call: Callable[[], Sized], tries: int) -> list[float]:
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        assert len(call()) == BATCH
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _peak(call: Callable[[], Sized]) -> float:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1] / 1e3
    finally:
        tracemalloc.stop()


def _reading() -> float:
    order, first = Permutation(CLAIMED, 1, 0), CLAIMED // 2
    start = time.perf_counter()
    for position in range(first, first + READS * BATCH, BATCH):
        order.take(position, position + BATCH)
    return (time.perf_counter() - start) / READS * 1e6


if __name__ == "__main__":
    main(run)
