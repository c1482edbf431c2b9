"""Batches of a Horovod rank: what is refused before ranks train on the wrong ones, and where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.frontends.framework_trainers.framework_stand_ins import HorovodRanks, Unsized, pairs
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from paceline.core.errors import UsageError
from paceline.frontends.framework_trainers.horovod_data import RankBatches

DATA = TensorDataset(torch.arange(12.0))


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(float(self._samples)))


def batches(loader: Any, what: str = "the training data") -> RankBatches:
    job: Any = HorovodRanks()
    return RankBatches(job, loader, what)


def test_a_dataset_without_a_length() -> None:
    made = batches(DataLoader(Stream(6), batch_size=4))
    assert (made.steps, made.samples, made.batch) == (None, None, 4)
    for epoch in range(2):
        assert [one.tolist() for one in made.of_epoch(epoch)] == [[0, 1, 2, 3], [4, 5]]
    # By the batches that this rank has passed: others had larger ones, or were lost since.
    assert [one.tolist() for one in made.of_epoch(0, offset=13, passed=1)] == [[4, 5]]
    assert [*made.of_epoch(0, offset=13, passed=2)] == []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: iter(pairs(2)), "is a list_iterator: it yields its batches once"),
        (lambda: (one for one in pairs(2)), "is a generator: it yields its batches once"),
        (
            lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)),
            "has a BatchSampler, and each rank gets a share of the samples",
        ),
        (lambda: DataLoader(DATA, batch_size=None), "has batch_size=None, and each rank gets a share"),
        (list, "has no batch on this rank"),
        (lambda: 3, "is an int"),
    ],
)
@pytest.mark.parametrize("what", ["the training data", "the validation data"])
def test_data_that_cannot_be_shared_is_refused_by_name(make: Callable[[], Any], said: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"{what} {said}"):
        batches(make(), what)


@pytest.mark.parametrize("loader", [Unsized([]), DataLoader(Stream(0), batch_size=4)])
def test_an_epoch_without_a_batch_is_refused(loader: Any) -> None:
    with pytest.raises(UsageError, match="the validation data has no batch on this rank"):
        list(batches(loader, "the validation data").of_epoch(0, 0))


def test_batches_come_on_the_device_of_the_rank() -> None:
    job: Any = HorovodRanks()
    job.device = torch.device("meta")
    (found,) = RankBatches(job, [{"x": torch.zeros(2), "name": "a"}]).of_epoch(0, 0)
    assert found["x"].device.type == "meta"
    assert found["name"] == "a"
