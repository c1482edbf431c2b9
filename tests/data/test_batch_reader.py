"""Reading: the same bits with any number of workers, in order, and nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.waiting import wait_for
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.core.errors import PlatformError, UsageError
from paceline.data.sources import Batch, Request, as_source, read


class Augmented(Dataset[Any]):
    """Every generator that an augmentation might use, and a sum whose bits depend on the threads."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {
            "number": number,
            "torch": torch.randn(3),
            "numpy": np.random.rand(2),
            "python": random.random(),
            "sum": torch.rand(40_000).sum(),
        }


def requests(steps: int = 7) -> list[Request]:
    order = np.random.default_rng(3).permutation(64)
    return [Request((11, 0, step, 2), order[step * 9 : step * 9 + 9]) for step in range(steps)]


def bits(batches: list[Batch]) -> list[Any]:
    return [[value.numpy().tobytes() for value in batch.data.values()] for batch in batches]


def loader(workers: int, dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset or Augmented(), num_workers=workers, **options)


def test_augmentations_do_not_depend_on_the_workers() -> None:
    alone = bits(list(read(as_source(loader(0)), requests())))
    assert len({tuple(batch) for batch in alone}) == 7
    torch.set_num_threads(2)
    assert bits(list(read(as_source(loader(0)), requests()))) == alone
    for workers in (1, 2):
        assert bits(list(read(as_source(loader(workers)), requests()))) == alone
    # What is read does not depend on what was read before it.
    assert bits(list(read(as_source(loader(0)), requests()[4:]))) == alone[4:]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_generators_of_the_caller_are_left_alone(workers: int) -> None:
    def draw() -> tuple[Any, ...]:
        return random.random(), np.random.rand(), torch.rand(1).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [draw() for _ in range(4)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    batches = read(as_source(loader(workers)), requests())
    seen = [draw()]
    for _ in range(3):
        next(batches)
        seen.append(draw())
    batches.close()
    assert seen == expected


def _read_in_a_rank(ctx: Any, dataset: Any, workers: int) -> list[Any]:
    return bits(list(read(as_source(loader(workers, dataset)), requests())))


def test_workers_of_a_loader_inside_the_workers_of_a_job() -> None:
    alone = bits(list(read(as_source(loader(0)), requests())))
    assert paceline.spawn(_read_in_a_rank, Augmented(), 2, workers=2) == [alone, alone]


class Waits(Dataset[Any]):
    """Sample 0 at once; any other says that it has begun and then never comes."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> int:
        if number:
            (self.begun / f"{os.getpid()}").touch()
            time.sleep(3600)
        return number


def one_by_one() -> list[Request]:
    return [Request((0,), np.array([number])) for number in range(6)]


def test_closing_ends_workers_that_are_inside_a_sample(tmp_path: Path) -> None:
    batches = read(as_source(loader(2, Waits(tmp_path))), one_by_one())
    assert next(batches).count == 1
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 3
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_dies_is_said(tmp_path: Path) -> None:
    batches = read(as_source(loader(1, Waits(tmp_path))), one_by_one())
    next(batches)
    wait_for(lambda: list(tmp_path.iterdir()))
    os.kill(int(next(tmp_path.iterdir()).name), 9)
    with pytest.raises(PlatformError, match="worker process of the loader of Waits failed") as caught:
        next(batches)
    assert "num_workers=1" in caught.value.remedy


def test_requests_are_taken_as_they_are_needed() -> None:
    taken: list[int] = []

    def endless() -> Any:
        number = 0
        while True:
            taken.append(number)
            yield Request((number,), np.array([number % 64]))
            number += 1

    for workers, ahead in ((0, 0), (1, 4)):
        taken.clear()
        batches = read(as_source(loader(workers, prefetch_factor=3 if workers else None)), endless())
        for expected in range(5):
            assert next(batches).data["number"].tolist() == [expected]
        assert len(taken) <= 5 + ahead
        batches.close()


def test_an_error_comes_at_its_place_and_ends_the_reading() -> None:
    class Third(Augmented):
        def __getitem__(self, number: int) -> Any:
            return {"number": 1 // (number - 3)}

    for workers in (0, 2):
        batches = read(as_source(loader(workers, Third())), one_by_one())
        assert [next(batches).count for _ in range(3)] == [1, 1, 1]
        with pytest.raises(UsageError, match=r"sample 3 .*ZeroDivisionError"):
            next(batches)
        assert list(batches) == []


def test_a_source_of_ones_own_that_raises_in_a_worker_is_said() -> None:
    class Bad(Augmented):
        def __getitem__(self, number: int) -> Any:
            raise Unpicklable(lambda: 0)

    with pytest.raises(UsageError, match=r"sample 0 of .*Bad cannot be read: Unpicklable"):
        next(read(as_source(loader(1, Bad())), one_by_one()))


class Unpicklable(Exception):  # noqa: N818
    pass


@pytest.mark.leaky("torch keeps its CUDA context until the process ends")
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinning() -> None:
    for workers in (0, 1):
        batch = next(read(as_source(loader(workers, pin_memory=True)), requests()))
        assert batch.data["torch"].is_pinned()
    arrays = as_source(loader(0, torch.utils.data.TensorDataset(torch.zeros(64)), pin_memory=True))
    assert next(read(arrays, requests())).data[0].is_pinned()


def test_pinning_keeps_what_is_no_tensor() -> None:
    data = {"a": ["text", (1, 2)], "b": None}
    assert Batch(data, 1).pin_memory().data == data
    assert Batch(data, 2).pin_memory().data == data


class TellsItsProcess(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> int:
        return os.getpid()


def test_a_signal_to_all_processes_does_not_end_the_loaders_workers() -> None:
    batches = read(as_source(DataLoader(TellsItsProcess(), num_workers=2, prefetch_factor=1)), requests())
    first = next(batches)
    for process in psutil.Process().children():
        if process.pid in first.data.tolist():
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGUSR1)
    assert len(list(batches)) == 6
