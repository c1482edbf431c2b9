"""Datasets of a TensorFlow trainer, found again by the batch of the epoch.

A `tf.data.Dataset` has batches of the global size; the strategy cuts each of them for its replicas. A
function of the epoch's number makes an order that differs by epoch and can be found again after a restart,
which a dataset that shuffles itself anew with every pass cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, final

from paceline.core.errors import UsageError
from paceline.core.wording import counted, with_article
from paceline.frontends.framework_trainers.tensorflow_steps import parts_of
from paceline.frontends.framework_trainers.tensorflow_strategy import TensorFlowJob

_GIVE: Final = "give a batched tf.data.Dataset, or a function from the epoch's number to one"


@final
class EpochDataset:
    """The dataset of each epoch. `steps`: batches of an epoch; None where that is not known. `batch`: samples
    of the first one."""

    def __init__(self, job: TensorFlowJob, given: Any, what: str = "the training data") -> None:
        self._job, self._given, self._what = job, given, what
        first = self._dataset(0)
        number = int(first.cardinality())
        self.steps = number if number >= 0 else None
        self._is_endless = number == job.tf.data.INFINITE_CARDINALITY
        self.first = next(iter(first), None)
        if self.first is None:
            raise UsageError(f"{what} is empty: it has no batch", remedy="give data with a sample or more")
        flat = job.tf.nest.flatten(parts_of(self.first)[0])[0]
        if not flat.shape.rank:
            raise UsageError(
                f"{what} is not batched: its first element has no dimension of samples",
                remedy="use dataset.batch(GLOBAL_BATCH)",
            )
        self.batch = int(flat.shape[0])
        if self.batch < self._cut:
            raise UsageError(
                f"{what} has batches of {counted(self.batch, 'sample')}, and the strategy has {self._cut} "
                "replicas: some would have none",
                remedy=f"use batches of {self._cut} samples or more: a batch is that of all replicas",
            )

    def refuse_endless(self, otherwise: str = "") -> None:
        """Refuse data of which a pass has no end."""
        if self._is_endless:
            raise UsageError(
                f"{self._what} repeats without end: a pass over it would never be over",
                remedy=f"use dataset.take(BATCHES), or leave repeat() out{otherwise}",
            )

    @property
    def _cut(self) -> int:
        """Into how many pieces a batch is cut."""
        return 1 if self._job.coordinator is not None else self._job.replicas

    def of_epoch(self, epoch: int, done: int) -> Iterator[Any]:
        """Return the batches of an epoch after the first `done`, as the strategy takes them."""
        dataset = self._dataset(epoch)
        rest = dataset.skip(done) if done else dataset
        if self._job.coordinator is not None:
            return iter(rest)
        distributed: Iterator[Any] = iter(self._job.strategy.experimental_distribute_dataset(rest))
        return distributed

    def _dataset(self, epoch: int) -> Any:
        kind = self._job.tf.data.Dataset
        made = self._given
        if callable(made) and not isinstance(made, kind):
            made = made(epoch)
        if not isinstance(made, kind):
            raise UsageError(f"{self._what} is {with_article(made)}", remedy=_GIVE)
        return made


def sizes_of(data: EpochDataset | None, what: str) -> dict[str, int | None]:
    """Return what workers that train in step agree on before they pass over data together."""
    return {
        f"the number of datasets for {what}": int(data is not None),
        f"the size of a batch for {what}": None if data is None else data.batch,
        f"the number of batches for {what}": None if data is None else data.steps,
    }
