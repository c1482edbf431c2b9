"""Map-style datasets: `dataset[number]` for each sample, or `__getitems__` for all of them, then a collate.

What a dataset raises comes out with the number of the sample and the type of the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from torch.utils.data import default_collate

from paceline.core.errors import PacelineError, UsageError
from paceline.core.wording import counted
from paceline.data.read_errors import collated, read_error
from paceline.data.source_interface import Batch, Indices, Skipped, SkippedSampleError


@final
@dataclass(frozen=True)
class Loading:
    """Settings of a `DataLoader` for reading: processes, their start, and pinning."""

    workers: int = 0
    prefetch: int = 2
    pin_memory: bool = False
    timeout: float = 0.0
    worker_init: Callable[[int], None] | None = None
    context: Any = None


@final
@dataclass(frozen=True, eq=False)
class MapSource:
    """Samples of `dataset`. `bulk`: the dataset takes a list of numbers, `collate` what it returns."""

    dataset: Any
    size: int
    collate: Callable[[Any], Any] = default_collate
    loading: Loading = Loading()
    bulk: bool = False

    def fetch(self, indices: Indices) -> Batch:
        numbers: list[int] = indices.tolist()
        if not numbers:
            return Batch(None, 0)
        skipped: tuple[Skipped, ...] = ()
        if self.bulk:
            samples, count = self._all(self.dataset.__getitem__, numbers), len(numbers)
        else:
            samples, skipped = self._samples(numbers)
            count = len(samples)
            if not count:
                return Batch(None, 0, skipped)
        data = collated(self.collate, samples, partial(self._some, numbers), tuple(numbers))
        return Batch(data, count, skipped)

    def sample(self, number: int) -> Any:
        """Return one sample as the dataset gives it, not collated."""
        samples, skipped = self._one_by_one([number])
        if skipped:
            raise SkippedSampleError(skipped[0].reason)
        return samples[0]

    def _samples(self, numbers: list[int]) -> tuple[Sequence[Any], tuple[Skipped, ...]]:
        read_all = getattr(self.dataset, "__getitems__", None)
        if callable(read_all):
            try:
                samples = self._all(read_all, numbers)
            except SkippedSampleError:
                # One of them must be left out; only one by one shows which.
                return self._one_by_one(numbers)
            if len(samples) != len(numbers):
                raise UsageError(
                    f"{self._name}.__getitems__ was asked for {counted(len(numbers), 'sample')} and gave "
                    f"{len(samples)}",
                    remedy="return one sample for each number, in order; to leave one out, raise "
                    "SkippedSampleError in __getitem__",
                )
            return samples, ()
        return self._one_by_one(numbers)

    def _one_by_one(self, numbers: list[int]) -> tuple[list[Any], tuple[Skipped, ...]]:
        samples: list[Any] = []
        skipped: list[Skipped] = []
        dataset = self.dataset
        number = -1
        try:
            for number in numbers:
                try:
                    samples.append(dataset[number])
                except SkippedSampleError as error:
                    skipped.append(Skipped(number, error.message))
        except PacelineError:
            raise
        except Exception as error:
            raise self._failed(f"sample {number} of {self._name}", error, number) from error
        return samples, tuple(skipped)

    def _all(self, read: Callable[[list[int]], Any], numbers: list[int]) -> Any:
        try:
            return read(numbers)
        except PacelineError:
            raise
        except Exception as error:
            raise self._failed(self._some(numbers), error, *numbers) from error

    def _failed(self, what: str, error: Exception, *numbers: int) -> UsageError:
        return read_error(
            f"{what} cannot be read",
            error,
            remedy=f"look at {self._name}'s own error above; `dataset[{numbers[0]}]` should show it",
            samples=numbers,
        )

    def _some(self, numbers: Sequence[int]) -> str:
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        return f"samples {', '.join(map(str, numbers[:8]))}{more} of {self._name}"

    @property
    def _name(self) -> str:
        return type(self.dataset).__qualname__
