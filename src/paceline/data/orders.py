"""Other orders than a plain shuffle, each a function of (seed, epoch): samples drawn by weight, samples of
like length side by side.

An order is a value that is laid over data: `order.over(data)` is data for `fit`, a session and `replay`. An
epoch has `positions` of it, which are cut into steps and shards as those of any data; the sample at a
position is computed where it is looked at, so a position is (epoch, step) as ever, and seeking costs nothing.
Integer arithmetic and sums of doubles in one fixed order: the same samples on every platform.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import counted
from paceline.data.permutation import Ids, InOrder, Permutation
from paceline.data.source_interface import Batch, Indices, Source
from paceline.data.whole_numbers import whole

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST = np.uint64(31)
_DOUBLE_BITS = np.uint64(11)  # of 64 that a double has no room for


class EpochOrder(Protocol):
    """The samples of one epoch, by position."""

    def take(self, start: int, stop: int) -> Ids: ...


class SampleOrder(ABC):
    """An order of samples that is laid over data; `WeightedOrder` and `LengthBuckets` are two."""

    replacement = False  # whether a sample may come several times in an epoch

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of samples of the data that the order is for."""

    @property
    @abstractmethod
    def positions(self) -> int:
        """The number of samples of an epoch."""

    @abstractmethod
    def of_epoch(self, seed: int, epoch: int, batch: int) -> EpochOrder:
        """Return the samples of an epoch of a run with steps of `batch` samples."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what defines the order, as plain data: its numbers as a digest."""

    def over(self, data: Any) -> OrderedData:
        """Return the data in this order: what `fit` and `microbatches` take."""
        return OrderedData(data, self)


@final
class WeightedOrder(SampleOrder):
    """Samples drawn with replacement, each as often as its weight has it, on average: `samples` draws in an
    epoch (as many as there are weights, where it is left out). Weight 0 is never drawn."""

    replacement = True

    def __init__(self, weights: Any, samples: int | None = None) -> None:
        self._weights = _numbers("weights", weights, np.float64)
        if not len(self._weights) or not np.isfinite(self._weights).all() or self._weights.min() < 0.0:
            raise UsageError(
                f"WeightedOrder: {_shown(self._weights)} are no weights",
                remedy="give a number for each sample, finite and not negative",
            )
        with np.errstate(over="ignore"):  # refused in words
            self._sums = np.cumsum(self._weights)
        if not 0.0 < self._sums[-1] < np.inf:
            raise UsageError(
                f"WeightedOrder: the sum of {counted(len(self._weights), 'weight')} is {self._sums[-1]}",
                remedy="give at least one sample a weight above 0, and none that is near the largest double",
            )
        self._positions = len(self._weights) if samples is None else whole("samples", samples, 1)
        self._last = int(np.flatnonzero(self._weights)[-1])

    @property
    def size(self) -> int:
        return len(self._weights)

    @property
    def positions(self) -> int:
        return self._positions

    def of_epoch(self, seed: int, epoch: int, batch: int) -> EpochOrder:
        return _Draws(self._sums, self._last, _key(b"paceline draws 1", self.size, seed, epoch))

    def facts(self) -> dict[str, Any]:
        return {
            "kind": "WeightedOrder",
            "samples": self.size,
            "positions": self.positions,
            "replacement": True,
            "digest": _digest(self._weights),
        }


@final
class LengthBuckets(SampleOrder):
    """Every sample once, in steps of samples of like length, so that little is padded.

    The shuffled samples of `pool` steps at a time are sorted by length and cut into steps, which come in a
    shuffled order: more steps in a pool are more alike, fewer are more random. Within a step the samples are
    sorted, so each shard pads to its own longest one.
    """

    def __init__(self, lengths: Any, pool: int = 50) -> None:
        self._lengths = _numbers("lengths", lengths, np.float64)
        if not len(self._lengths) or np.isnan(self._lengths).any():
            raise UsageError(
                f"LengthBuckets: {_shown(self._lengths)} are no lengths",
                remedy="give a number for each sample",
            )
        self.pool = whole("pool", pool, 1)

    @property
    def size(self) -> int:
        return len(self._lengths)

    @property
    def positions(self) -> int:
        return len(self._lengths)

    def of_epoch(self, seed: int, epoch: int, batch: int) -> EpochOrder:
        return _Buckets(self._lengths, self.pool, seed, epoch, batch)

    def facts(self) -> dict[str, Any]:
        return {
            "kind": "LengthBuckets",
            "samples": self.size,
            "positions": self.positions,
            "replacement": False,
            "pool": self.pool,
            "digest": _digest(self._lengths),
        }


@final
class _Draws:
    """The draws of one epoch: a hash of the position, as a share of the weights' sum."""

    def __init__(self, sums: NDArray[np.float64], last: int, key: int) -> None:
        self._sums, self._last, self._key = sums, last, np.uint64(key)

    def take(self, start: int, stop: int) -> Ids:
        words = np.arange(start + 1, stop + 1, dtype=np.uint64)
        words *= _GOLDEN
        words += self._key
        for shift, factor in _MIX:
            words ^= words >> np.uint64(shift)
            words *= np.uint64(factor)
        words ^= words >> _LAST
        shares = (words >> _DOUBLE_BITS).astype(np.float64) * 2.0**-53
        found: Ids = np.searchsorted(self._sums, shares * self._sums[-1], side="right").astype(np.int64)
        # The largest share may be rounded up to the whole sum.
        np.minimum(found, self._last, out=found)
        return found


@final
class _Buckets:
    """The samples of one epoch, pool by pool; the last one that was asked for is kept."""

    def __init__(self, lengths: NDArray[np.float64], pool: int, seed: int, epoch: int, batch: int) -> None:
        self._lengths, self._batch, self._seed, self._epoch = lengths, batch, seed, epoch
        self._shuffled = Permutation(len(lengths), seed, epoch)
        self._positions = pool * batch
        self._held: tuple[int, Ids] = (-1, np.empty(0, np.int64))

    def take(self, start: int, stop: int) -> Ids:
        parts = []
        for pool in range(start // self._positions, -(-stop // self._positions)):
            first = pool * self._positions
            parts.append(self._pool(pool)[max(start - first, 0) : stop - first])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _pool(self, pool: int) -> Ids:
        if self._held[0] != pool:
            self._held = (pool, self._sorted(pool))
        return self._held[1]

    def _sorted(self, pool: int) -> Ids:
        first = pool * self._positions
        ids = self._shuffled.take(first, min(first + self._positions, len(self._lengths)))
        ids = ids[np.argsort(self._lengths[ids], kind="stable")]
        full, rest = divmod(len(ids), self._batch)
        # Apart from the order of the samples themselves, which has the epoch alone as its number.
        number = ((self._epoch + 1) << 32) + pool
        # The short step is the last of the epoch, and its samples are not always the longest ones.
        place = Permutation(full + 1, self._seed, number)[0] * self._batch
        short, ids = ids[place : place + rest], np.delete(ids, slice(place, place + rest))
        steps = ids.reshape(full, self._batch)[Permutation(full, self._seed, number).take(0, full)]
        return np.concatenate([steps.reshape(-1), short])


@final
@dataclass(frozen=True, eq=False)
class OrderedData:
    """Data of the user's in an order of its own; made by `SampleOrder.over`."""

    data: Any
    order: SampleOrder


@final
@dataclass(frozen=True, eq=False)
class OrderedSource:
    """A source of samples by number, and the order in which a run takes them."""

    source: Source
    order: SampleOrder

    def __post_init__(self) -> None:
        if isinstance(self.source, OrderedSource):
            raise UsageError(
                f"{type(self.order).__name__} over data that has the order "
                f"{type(self.source.order).__name__}: an epoch has one order",
                remedy="give the order the data itself, without an order or a WeightedRandomSampler",
            )
        if self.source.size is None:
            raise UsageError(
                f"{type(self.order).__name__} over a stream, which has an order of its own",
                remedy="give data with a length and samples by number",
            )
        if self.source.size != self.order.size:
            raise UsageError(
                f"{type(self.order).__name__} is for {counted(self.order.size, 'sample')}, and the data has "
                f"{self.source.size}",
                remedy="give one number for each sample of the data; weight 0 leaves a sample out",
            )

    @property
    def size(self) -> int:
        return self.order.positions

    def fetch(self, indices: Indices) -> Batch:
        return self.source.fetch(indices)


def epoch_order(source: Source, *, seed: int, epoch: int, batch: int, shuffle: bool) -> EpochOrder:
    """Return the samples of an epoch of a run over this source, which has a size."""
    check_shuffled(source, shuffle)
    if isinstance(source, OrderedSource):
        return source.order.of_epoch(seed, epoch, batch)
    size = source.size or 0
    return Permutation(size, seed, epoch) if shuffle else InOrder(size)


def check_shuffled(source: Source, shuffle: bool) -> None:
    """Refuse data with an order of its own for a run that is to take samples as they come."""
    if isinstance(source, OrderedSource) and not shuffle:
        raise ConfigError(
            f"shuffle=False, and the data has the order {type(source.order).__name__}",
            remedy="leave shuffle out, or give the data without the order",
            key="shuffle",
        )


def facts_of(source: Source) -> dict[str, Any] | None:
    """Return the facts of the order that lies over a source; None for the usual ones."""
    return source.order.facts() if isinstance(source, OrderedSource) else None


def _key(person: bytes, size: int, seed: int, epoch: int) -> int:
    digest = hashlib.blake2b(struct.pack("<QQQ", size, seed, epoch), digest_size=8, person=person).digest()
    return int.from_bytes(digest, "little")


def _numbers(name: str, given: Any, dtype: Any) -> NDArray[Any]:
    plain = given.detach().cpu().numpy() if isinstance(given, Tensor) else given
    try:
        made = np.array(plain, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name} are not numbers: {error}", remedy=f"give {name} as a list or array"
        ) from None
    if made.ndim != 1:
        raise UsageError(f"{name} have shape {made.shape}", remedy="give one number for each sample")
    return made


def _digest(numbers: NDArray[Any]) -> str:
    return hashlib.blake2b(numbers.astype("<f8").tobytes(), digest_size=16).hexdigest()


def _shown(numbers: Sequence[Any] | NDArray[Any]) -> str:
    return f"[{', '.join(f'{float(one):g}' for one in numbers[:5])}{', ...' if len(numbers) > 5 else ''}]"
