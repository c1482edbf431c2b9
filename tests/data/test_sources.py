"""Datasets and loaders as sources: what is taken over or refused, and who is named when reading fails."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from paceline.core.errors import UsageError
from paceline.data.sources import Batch, MapSource, Request, SkippedSampleError, as_source, read

IDS = np.array([5, 1, 9])


class Squares(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        return torch.full((2,), float(number)), number * number


class Many(Squares):
    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        self.asked.append(numbers)
        return [self[number] for number in numbers]


class Broken(Squares):
    def __getitem__(self, number: int) -> tuple[Any, Any]:
        if number == 9:
            raise KeyError("no such file")
        return super().__getitem__(number)


class Holes(Squares):
    def __getitem__(self, number: int) -> tuple[Any, Any]:
        if number % 2:
            raise SkippedSampleError(f"{number} is odd")
        return super().__getitem__(number)


def as_numbers(samples: list[Any]) -> dict[str, Any]:
    return {"squares": [square for _, square in samples]}


def test_a_map_style_dataset() -> None:
    source = as_source(Squares())
    batch = source.fetch(IDS)
    assert source.size == 12
    assert batch.data[0][:, 0].tolist() == [5, 1, 9]
    assert batch.data[1].tolist() == [25, 1, 81]
    assert batch.count == 3


def test_all_samples_of_a_batch_are_asked_for_at_once_where_the_dataset_can() -> None:
    dataset = Many()
    assert as_source(dataset).fetch(IDS).data[1].tolist() == [25, 1, 81]
    assert dataset.asked == [[5, 1, 9]]
    assert type(dataset.asked[0][0]) is int


def test_datasets_of_torch_and_plain_lists() -> None:
    assert as_source(Subset(Squares(), [9, 5])).fetch(np.array([1, 0])).data[1].tolist() == [25, 81]
    assert as_source(ConcatDataset([Squares(), Squares()])).fetch(np.array([12 + 3])).data[1].tolist() == [9]
    assert as_source([{"a": i} for i in range(4)]).fetch(np.array([3, 0])).data["a"].tolist() == [3, 0]
    assert as_source(range(10)).fetch(IDS).data.tolist() == [5, 1, 9]


def test_a_source_is_itself() -> None:
    class Mine:
        size = 3

        def fetch(self, indices: np.ndarray) -> Batch:
            return Batch(indices + random.random(), len(indices))

    mine = Mine()
    assert as_source(mine) is mine
    first, second = (next(read(mine, [Request((1, 2), IDS)])).data for _ in range(2))
    assert first.tolist() == second.tolist()
    other = as_source(Squares())
    assert as_source(other) is other


def test_a_loader_is_taken_over(caplog: pytest.LogCaptureFixture) -> None:
    def seed_worker(worker: int) -> None:
        random.seed(worker)

    loader = DataLoader(
        Squares(),
        batch_size=7,
        shuffle=True,
        collate_fn=as_numbers,
        num_workers=2,
        prefetch_factor=3,
        timeout=60,
        worker_init_fn=seed_worker,
        multiprocessing_context="fork",
    )
    with caplog.at_level(logging.INFO, "paceline"):
        source = as_source(loader)
    assert isinstance(source, MapSource)
    assert source.fetch(IDS).data == {"squares": [25, 1, 81]}
    loading = source.loading
    assert (loading.workers, loading.prefetch, loading.timeout) == (2, 3, 60)
    assert loading.worker_init is seed_worker
    assert loading.context.get_start_method() == "fork"
    assert "batch_size=7, RandomSampler and drop_last=False are not used" in caplog.text


def test_samplers_that_give_every_sample_once_are_replaced() -> None:
    dataset = Squares()
    choices: list[dict[str, Any]] = [
        {},
        {"shuffle": True},
        {"sampler": SequentialSampler(dataset)},
        {"sampler": DistributedSampler(dataset, 2, 0)},
        {"batch_sampler": BatchSampler(RandomSampler(dataset), 4, False)},
    ]
    for options in choices:
        assert as_source(DataLoader(dataset, **options)).size == 12


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(3)),
        RandomSampler(range(12), replacement=True),
        RandomSampler(range(12), num_samples=5),
        [3, 1, 2],
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_samplers_that_choose_are_refused(sampler: Any) -> None:
    dataset = Squares()
    for options in ({"sampler": sampler}, {"batch_sampler": BatchSampler(sampler, 2, False)}):
        with pytest.raises(UsageError, match=type(sampler).__name__) as caught:
            as_source(DataLoader(dataset, **options))
        assert "Subset" in caught.value.remedy


def test_a_batch_sampler_of_the_users_own_is_refused() -> None:
    with pytest.raises(UsageError, match="own batch_sampler"):
        as_source(DataLoader(Squares(), batch_sampler=[[0, 1], [2]]))


def test_a_dataset_that_takes_lists_of_numbers() -> None:
    class Table(Squares):
        def __getitem__(self, numbers: Any) -> Any:
            assert type(numbers) is list
            return torch.tensor(numbers) * 2

    dataset = Table()
    loader = DataLoader(dataset, batch_size=None, sampler=BatchSampler(SequentialSampler(dataset), 4, False))
    batch = as_source(loader).fetch(IDS)
    assert batch.data.tolist() == [10, 2, 18]
    assert batch.count == 3


def test_a_loader_that_never_collates_is_refused() -> None:
    with pytest.raises(UsageError, match="batch_size=None"):
        as_source(DataLoader(Squares(), batch_size=None))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_raises_is_named(workers: int) -> None:
    source = as_source(DataLoader(Broken(), num_workers=workers))
    with pytest.raises(
        UsageError, match="sample 9 of Broken cannot be read: KeyError: 'no such file'"
    ) as caught:
        list(read(source, [Request((0,), IDS)]))
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.facts["samples"] == (9,)
    if workers:
        assert "in a worker process" in "".join(caught.value.__notes__)


def test_samples_asked_for_at_once_that_raise_are_named() -> None:
    class Bad(Many):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            raise OSError("disk")

    class Short(Many):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return []

    with pytest.raises(UsageError, match=r"samples 5, 1, 9 of .*Bad cannot be read: OSError: disk"):
        as_source(Bad()).fetch(IDS)
    with pytest.raises(UsageError, match=r"__getitems__ was asked for 3 samples and gave 0"):
        as_source(Short()).fetch(IDS)


def test_samples_that_do_not_fit_together_are_named() -> None:
    with pytest.raises(UsageError, match=r"samples 1, 2 of list cannot be put into one batch: RuntimeError"):
        as_source([torch.zeros(i) for i in range(4)]).fetch(np.array([1, 2]))


def test_samples_that_are_left_out_are_counted_and_named() -> None:
    class HolesAtOnce(Holes):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return [self[number] for number in numbers]

    for dataset in (Holes(), HolesAtOnce()):
        batch = as_source(dataset).fetch(np.arange(5))
        assert batch.count == 3
        assert batch.data[1].tolist() == [0, 4, 16]
        assert [(skipped.index, skipped.reason) for skipped in batch.skipped] == [
            (1, "1 is odd"),
            (3, "3 is odd"),
        ]
        nothing = as_source(dataset).fetch(np.array([1]))
        assert (nothing.data, nothing.count, len(nothing.skipped)) == (None, 0, 1)


@pytest.mark.parametrize("data", [5, "text", None, {"a": 1}, Squares, object()])
def test_what_is_no_data(data: Any) -> None:
    with pytest.raises(UsageError) as caught:
        as_source(data)
    assert "NumPy array" in caught.value.remedy


def test_a_dataset_without_a_length() -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, number: int) -> int:
            return number

    with pytest.raises(UsageError, match="Endless has __getitem__ and no length"):
        as_source(Endless())


def test_a_tensor_dataset_with_a_collate_of_its_own_is_read_by_it() -> None:
    dataset = TensorDataset(torch.arange(10))
    loader = DataLoader(dataset, collate_fn=lambda rows: [int(value) for (value,) in rows])
    assert as_source(loader).fetch(IDS).data == [5, 1, 9]
