"""Batches of one Horovod rank, found again by the position in the epoch, for any number of ranks.

A DataLoader is taken as its dataset, batch size and collation: each rank gets its share of the epoch's order
from a position on, so that a run goes on where it was with more ranks or fewer. Whatever else yields batches
is the rank's own and used as it is: all ranks have passed the same number of them.
"""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, final

from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.frontends.framework_trainers.horovod_job import HorovodJob
from paceline.train.step.batch_feed import to_device

_KEPT = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn")
_GIVE = "give a DataLoader, or a list of batches"


@final
class RankShare(Sampler[int]):
    """Samples of one rank: the epoch's order, dealt out to the ranks one by one from an offset on.

    The order is that of Horovod's ElasticSampler. Ranks that it does not divide begin it again, so that all
    have as many samples; an undisturbed epoch and one that goes on from an offset end with the same ones.
    """

    def __init__(self, samples: int, *, shuffle: bool, seed: int) -> None:
        self._samples, self._shuffle, self._seed = samples, shuffle, seed
        self._epoch, self._positions = 0, range(0)

    def turn_to(self, epoch: int, offset: int, rank: int, ranks: int) -> None:
        """Turn to what is left of an epoch when `offset` of its samples have been passed."""
        left = max(0, self._samples - offset)
        rounds = -(-left // ranks)
        self._epoch, self._positions = epoch, range(offset + rank, offset + rounds * ranks, ranks)

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._samples))
        if self._shuffle:
            random.Random(self._seed + self._epoch).shuffle(order)
        return (order[position % self._samples] for position in self._positions)

    def __len__(self) -> int:
        return len(self._positions)


@final
class RankBatches:
    """Batches of this rank. `samples`: of the whole dataset; None where that is not known. `batch`: samples
    of one rank's batch, as far as that is known."""

    def __init__(
        self, job: HorovodJob, loader: Any, what: str = "the training data", *, shuffle: bool | None = None
    ) -> None:
        self._job, self._what = job, what
        self._share: RankShare | None = None
        self._loader: Any = loader
        self.samples: int | None = None
        self.batch = int(getattr(loader, "batch_size", None) or 1)
        if not isinstance(loader, Iterable):
            raise UsageError(f"{what} is {with_article(loader)}", remedy=_GIVE)
        if isinstance(loader, Iterator):
            raise UsageError(
                f"{what} is {with_article(loader)}: it yields its batches once, and every epoch needs them",
                remedy=_GIVE + ", or an object whose __iter__ begins anew",
            )
        if isinstance(loader, DataLoader):
            self._take(loader, shuffle)
        if self.samples == 0 or _length(self._loader) == 0:
            raise self._empty()

    @property
    def is_own(self) -> bool:
        """Whether the batches are this rank's own, and no share of a dataset."""
        return self._share is None

    @property
    def steps(self) -> int | None:
        """Batches of a whole epoch; None where that is not known."""
        self._turn_to(0, 0)
        return _length(self._loader)

    @property
    def first(self) -> Any:
        """The first batch, for what is inferred from the data."""
        return next(iter(self._loader))

    def of_epoch(self, epoch: int, offset: int = 0, passed: int = 0) -> Iterator[tuple[Any, int]]:
        """Return the batches of an epoch from a position on, on this rank's device, each with the number of
        its samples; all ranks make the same number of steps. `offset`: samples of the dataset that all ranks
        have passed; `passed`: batches that this rank has, of data of its own."""
        self._turn_to(epoch, offset)
        begun = iter(self._loader)  # here, and not with the first batch: it draws the seed of its workers
        return self._own(begun, passed) if self._share is None else self._shared(begun, len(self._share))

    def _shared(self, batches: Iterator[Any], left: int) -> Iterator[tuple[Any, int]]:
        """Yield batches of the share, which has `left` samples. A batch does not say how many it has: its
        tensors may be sequences, or have time as their first dimension."""
        for batch in batches:
            samples = min(self.batch, left)
            left -= samples
            yield to_device(batch, self._job.device), samples

    def _own(self, begun: Iterator[Any], passed: int) -> Iterator[tuple[Any, int]]:
        """Return the batches behind those that were passed. The first is read at once, as is what was passed:
        data that draws its order does so with its first batch."""
        batches = self._in_step(begun)
        first = next(batches, None)
        if first is None:
            raise self._empty()
        if passed:
            collections.deque(itertools.islice(batches, passed - 1), maxlen=0)
        else:
            batches = itertools.chain([first], batches)
        return ((to_device(batch, self._job.device), size_of(batch)) for batch in batches)

    def _turn_to(self, epoch: int, offset: int) -> None:
        if self._share is not None:
            self._share.turn_to(epoch, offset, self._job.rank, self._job.size)

    def _in_step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches until a rank has no more."""
        import torch

        hvd = self._job.hvd
        known = _length(self._loader) is not None
        while True:
            batch = next(batches, None)
            if not known:
                has = torch.tensor([0.0 if batch is None else 1.0])
                if float(hvd.allreduce(has, op=hvd.Min, name="paceline.has_batch")) == 0.0:
                    return
            if batch is None:
                return
            yield batch

    def _take(self, loader: DataLoader[Any], shuffle: bool | None) -> None:
        sampler: Any = loader.sampler
        if isinstance(loader.dataset, IterableDataset):
            return
        if loader.batch_size is None:
            what = "batch_size=None" if loader.batch_sampler is None else with_article(loader.batch_sampler)
            raise UsageError(
                f"the DataLoader of {self._what} has {what}, and each rank gets a share of the samples: all "
                "ranks would train on all of them",
                remedy="give batch_size=... in its place; or give the rank's own batches, a list or an "
                "iterable dataset",
            )
        if isinstance(sampler, DistributedSampler) and sampler.num_replicas != self._job.size:
            raise UsageError(
                f"the DistributedSampler of {self._what} is for {sampler.num_replicas} ranks, and Horovod "
                f"has {self._job.size}",
                remedy="leave the sampler out: HorovodTrainer gives every rank its share",
            )
        known = isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler)
        if not known:
            raise UsageError(
                f"the DataLoader of {self._what} has {with_article(sampler)} as its sampler, and each rank "
                "gets a share",
                remedy="leave the sampler out; or give the rank's own batches, a list or an iterable dataset",
            )
        own = bool(getattr(sampler, "shuffle", isinstance(sampler, RandomSampler)))
        shuffled = own if shuffle is None else shuffle
        self.samples = len(loader.dataset)  # type: ignore[arg-type]
        self._share = RankShare(self.samples, shuffle=shuffled, seed=getattr(sampler, "seed", 0))
        self._turn_to(0, 0)
        kept = {name: getattr(loader, name) for name in _KEPT}
        self._loader = DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=self._share, **kept)

    def _empty(self) -> UsageError:
        return UsageError(
            f"{self._what} has no batch on this rank",
            remedy="give data with at least one sample for each rank; drop_last leaves out what is no whole "
            "batch",
        )


def _length(batches: Any) -> int | None:
    """Return the number of batches; None where it is not known: a DataLoader has a length also where its
    iterable dataset has none, and says so only when it is asked."""
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:
        return None


def size_of(batch: Any) -> int:
    """Return the samples of a batch of the rank's own: the length of its first tensor or array, or else of
    its first list of other things."""
    counts = list(_counts(batch))
    return next((count for is_array, count in counts if is_array), counts[0][1] if counts else 1)


def _counts(batch: Any) -> Iterator[tuple[bool, int]]:
    """Yield the lengths of what a batch holds, and whether that is an array."""
    if isinstance(batch, PackedSequence):
        yield True, int(batch.batch_sizes[0])  # how many of its sequences have a first element
    elif _is_array(batch):
        yield True, int(batch.shape[0])
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _counts(value)
    elif isinstance(batch, list | tuple):
        if batch and not any(_is_array(one) or isinstance(one, list | tuple | Mapping) for one in batch):
            yield False, len(batch)
        else:
            for value in batch:
                yield from _counts(value)
    elif hasattr(batch, "__dict__"):
        for value in vars(batch).values():
            if _is_array(value):
                yield True, int(value.shape[0])


def _is_array(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return isinstance(shape, tuple) and len(shape) > 0
