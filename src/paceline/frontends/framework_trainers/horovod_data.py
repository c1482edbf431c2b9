"""Batches of one Horovod rank, found again by the position in the epoch, for any number of ranks.

A DataLoader is taken as its dataset, batch size and collation: Horovod's ElasticSampler gives each rank its
share from a position on, so that a run goes on where it was with more ranks or fewer. Whatever else yields
batches is the rank's own and used as it is: all ranks have passed the same number of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, final

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.frontends.framework_trainers.horovod_job import HorovodJob
from paceline.train.step.batch_feed import to_device

_KEPT = ("num_workers", "collate_fn", "pin_memory", "drop_last", "timeout", "worker_init_fn")
_GIVE = "give a DataLoader, or a list of batches"


@final
class RankBatches:
    """Batches of this rank. `samples`: of the whole dataset; None where that is not known. `batch`: samples
    of one rank's batch, as far as that is known."""

    def __init__(
        self, job: HorovodJob, loader: Any, what: str = "the training data", *, shuffle: bool | None = None
    ) -> None:
        self._job, self._what = job, what
        self._sampler: Any = None
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
        return self._sampler is None

    @property
    def steps(self) -> int | None:
        """Batches of a whole epoch; None where that is not known."""
        if self._sampler is not None:
            self._sampler.load_state_dict({"epoch": 0, "processed_num": 0})
        return _length(self._loader)

    @property
    def first(self) -> Any:
        """The first batch, for what is inferred from the data."""
        return next(iter(self._loader))

    def of_epoch(self, epoch: int, offset: int = 0, passed: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from a position on, on this rank's device; all ranks make the same
        number of steps. `offset`: samples of the dataset that all ranks have passed; `passed`: batches that
        this rank has, of data of its own."""
        if self._sampler is not None:
            self._sampler.load_state_dict({"epoch": epoch, "processed_num": offset})
            for batch in self._loader:
                yield to_device(batch, self._job.device)
            return
        number = -1
        for number, batch in enumerate(self._in_step(iter(self._loader))):
            if number >= passed:
                yield to_device(batch, self._job.device)
        if number < 0:
            raise self._empty()

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
        elastic = self._job.hvd.elastic
        self.samples = len(loader.dataset)  # type: ignore[arg-type]
        self._sampler = elastic.ElasticSampler(
            loader.dataset, shuffle=shuffled, seed=getattr(sampler, "seed", 0)
        )
        kept = {name: getattr(loader, name) for name in _KEPT}
        self._loader = DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=self._sampler, **kept)

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
    """Return the samples of a batch: the length of its first tensor or array."""
    if isinstance(batch, Tensor) or hasattr(batch, "shape"):
        return int(batch.shape[0]) if len(batch.shape) else 1
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    if isinstance(values, list | tuple) and values:
        return size_of(values[0])
    return 1
