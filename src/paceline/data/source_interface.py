"""Interface of a source of samples: requests to it, and the batches that it returns.

A `Source` turns sample numbers into a collated batch, in the calling process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import numpy as np
import torch

from paceline.core.errors import PlatformError
from paceline.data.containers import map_leaves

Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@final
@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that was asked for and left out, and why."""

    index: int
    reason: str


@final
@dataclass(frozen=True, slots=True)
class Batch:
    """Collated samples. `count` is how many are really in it; with a count of 0, `data` is None."""

    data: Any
    count: int
    skipped: tuple[Skipped, ...] = ()

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory (torch's loader calls this by its name)."""
        data = map_leaves(
            self.data, lambda one: one.pin_memory() if one.device.type == "cpu" else one, _pinned_object
        )
        return Batch(data, self.count, self.skipped)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Samples to read together. `key` seeds the randomness of reading them: every process that reads a
    request draws the same numbers."""

    key: tuple[int, ...]
    indices: Indices


@runtime_checkable
class Source(Protocol):
    """Samples by number, collated."""

    @property
    def size(self) -> int | None:
        """The number of samples; None where only reading to the end would show it (a stream)."""

    def fetch(self, indices: Indices) -> Batch:
        """Return the samples with these numbers in this order, as one batch, read in this process."""


class SkippedSampleError(PlatformError):
    """A sample cannot be read, and the policy of its dataset, which raises this, leaves it out: the batch
    lists it in `Batch.skipped`."""

    usual_remedy = "read through paceline (which leaves the sample out and reports it), or catch this error"


def _pinned_object(data: Any) -> Any:
    # What can do that by itself does.
    pin = getattr(data, "pin_memory", None)
    return pin() if callable(pin) else data


def can_pin() -> bool:
    """Return whether there is an accelerator, which alone profits from page-locked memory."""
    return torch.cuda.is_available()
