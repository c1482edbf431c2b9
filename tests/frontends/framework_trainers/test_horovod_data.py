"""Batches of a Horovod rank: what is refused before ranks train on the wrong ones, and where they lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.frontends.framework_trainers.framework_stand_ins import HorovodRanks, Unsized, pairs
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from paceline.core.errors import UsageError
from paceline.frontends.framework_trainers.horovod_data import RankBatches, RankShare, size_of

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


def lists(of_epoch: Iterator[tuple[Any, int]]) -> list[Any]:
    return [batch.tolist() for batch, _ in of_epoch]


def test_a_dataset_without_a_length() -> None:
    made = batches(DataLoader(Stream(6), batch_size=4))
    assert (made.steps, made.samples, made.batch) == (None, None, 4)
    for epoch in range(2):
        assert lists(made.of_epoch(epoch)) == [[0, 1, 2, 3], [4, 5]]
    # By the batches that this rank has passed: others had larger ones, or were lost since.
    assert lists(made.of_epoch(0, offset=13, passed=1)) == [[4, 5]]
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
    ((found, _),) = RankBatches(job, [{"x": torch.zeros(2), "name": "a"}]).of_epoch(0, 0)
    assert found["x"].device.type == "meta"
    assert found["name"] == "a"


def dealt(samples: int, ranks: int, *, offset: int = 0, shuffle: bool = False) -> list[list[int]]:
    """Return what the ranks read in each round."""
    share = RankShare(samples, shuffle=shuffle, seed=3)
    by_rank = []
    for rank in range(ranks):
        share.turn_to(2, offset, rank, ranks)
        by_rank.append(list(share))
        assert len(share) == len(by_rank[-1])
    return [list(one) for one in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("samples", "ranks"), [(10, 4), (12, 4), (5, 4), (1, 3), (7, 1)])
def test_an_epoch_that_goes_on_ends_with_the_same_samples(samples: int, ranks: int, shuffle: bool) -> None:
    """Also where the ranks do not divide what is left, or are more than that."""
    whole = dealt(samples, ranks, shuffle=shuffle)
    order = list(range(samples))
    if shuffle:
        random.Random(3 + 2).shuffle(order)
    assert [one for part in whole for one in part][:samples] == order
    for rounds in range(len(whole) + 1):
        assert dealt(samples, ranks, offset=rounds * ranks, shuffle=shuffle) == whole[rounds:]


def test_other_ranks_go_on_where_an_epoch_is() -> None:
    assert dealt(10, 3, offset=4) == [[4, 5, 6], [7, 8, 9]]
    assert dealt(5, 4, offset=4) == [[4, 0, 1, 2]]
    assert dealt(10, 4, offset=13) == []


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 4), 3),
        ([torch.zeros(5, 2), torch.zeros(5)], 5),
        ({"text": ["a", "b", "c"], "ids": torch.zeros(3, 4)}, 3),
        ({"scale": torch.tensor(1.0), "inner": {"ids": torch.zeros(6, 4)}}, 6),
        ((("a", "b"), [1, 2]), 2),
        (pack_sequence([torch.zeros(4, 2), torch.zeros(3, 2), torch.zeros(1, 2)]), 3),
        (type("Batch", (), {})(), 1),
        (torch.tensor(1.0), 1),
    ],
)
def test_samples_of_a_batch_of_ones_own(batch: Any, samples: int) -> None:
    assert size_of(batch) == samples


def test_samples_of_an_object_with_tensors() -> None:
    batch: Any = type("Batch", (), {})()
    batch.names, batch.x = ["a"], torch.zeros(7, 2)
    assert size_of(batch) == 7


@pytest.mark.parametrize(("drop_last", "counts"), [(False, [5, 5, 2]), (True, [5, 5])])
def test_samples_of_a_dataset_are_counted_and_not_read_off_a_batch(
    drop_last: bool, counts: list[int]
) -> None:
    """A collation may put time first, or a text, or what is no container."""
    loader = DataLoader(
        DATA, batch_size=5, drop_last=drop_last, collate_fn=lambda rows: torch.zeros(31, len(rows))
    )
    made = batches(loader)
    assert made.steps == len(counts)
    assert [count for _, count in made.of_epoch(0)] == counts
    assert [count for _, count in made.of_epoch(0, offset=5)] == counts[1:]
