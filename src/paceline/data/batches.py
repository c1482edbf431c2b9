"""The words of reading: what is asked of a source of samples, and what comes back.

A `Source` turns sample numbers into a collated batch, in the calling process. Must not know where samples
come from, who asks for which of them, nor what is learned from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import PlatformError
from paceline.data.containers import changed

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
        """The same batch in page-locked memory (torch's loader calls this by its name)."""
        return Batch(pinned(self.data), self.count, self.skipped)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Samples to read together. `key` seeds the randomness of reading them: whoever reads a request, in
    whatever process, draws the same numbers."""

    key: tuple[int, ...]
    indices: Indices


@runtime_checkable
class Source(Protocol):
    """Samples by number, collated."""

    @property
    def size(self) -> int | None:
        """How many samples there are; None where only reading to the end would tell (a stream)."""

    def fetch(self, indices: Indices) -> Batch:
        """The samples with these numbers in this order, as one batch, read in this process."""


class SkippedSampleError(PlatformError):
    """Raised by a dataset for a sample that cannot be read and that its policy leaves out: the batch goes on
    without it and says so in `Batch.skipped`."""

    usual_remedy = "read through paceline (which leaves the sample out and reports it), or catch this error"


def pinned(data: Any) -> Any:
    """`data` with every tensor in page-locked memory; what can do that by itself does."""
    return changed(data, _pinned_tensor, _pinned_object)


def _pinned_tensor(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def _pinned_object(data: Any) -> Any:
    pin = getattr(data, "pin_memory", None)
    return pin() if callable(pin) else data


def can_pin() -> bool:
    """Page-locked memory exists for the sake of an accelerator."""
    return torch.cuda.is_available()
