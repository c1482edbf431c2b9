"""The order of an epoch: a seeded bijection on range(size) that is computed where it is looked at, never
stored.

How: a position is written as two digits (left, right) in the radices a and b, a * b >= size, both about the
square root of size. Each of eight rounds adds a keyed hash of one digit to the other, modulo that digit's
radix: a Feistel network, invertible whatever the hash. The fewer than sqrt(size) numbers of the domain that
are no samples are stepped over by applying the network again (cycle walking). Up to one block of samples the
ids are sorted by a keyed hash instead: that costs no more memory, and every order of a few samples is as
likely as any other.

What it depends on: (size, seed, epoch) through BLAKE2b, then 64-bit integer arithmetic: the same on every
platform, for every number of workers, and for good (a golden test pins it). What it costs: one cached block
of ids, and as much for position 0 as for the middle of a hundred million.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.data.whole_numbers import whole

Ids = NDArray[np.int64]
_Words = NDArray[np.uint64]

LARGEST_SIZE = 2**48
LARGEST_SEED = 2**64 - 1
BLOCK = 4096

_ROUNDS = 8
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_STIR = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)
# Of a 64-bit hash the upper 40 bits choose a digit below 2**24: the product just fits into 64 bits, and no
# digit is favoured by more than one part in 2**16.
_HASH_SHIFT = np.uint64(24)
_DIGIT_SHIFT = np.uint64(40)


@final
@dataclass(unsafe_hash=True)
class Permutation:
    """Samples 0 to size - 1 in the order of one epoch; `take(start, stop)` are the ids at those positions."""

    size: int
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        self.size = whole("size", self.size, 0, LARGEST_SIZE)
        self.seed = whole("seed", self.seed, 0, LARGEST_SEED)
        self.epoch = whole("epoch", self.epoch, 0, LARGEST_SEED)
        self._keys = _round_keys(self.size, self.seed, self.epoch)
        left = math.isqrt(self.size - 1) + 1 if self.size else 1
        self._radices = (np.uint64(left), np.uint64(-(-self.size // left)))
        # One attribute, replaced as a whole: threads that share a permutation see one block or the other.
        self._block: tuple[int, Ids] = (-1, np.empty(0, np.int64))

    def take(self, start: int, stop: int) -> Ids:
        """Return the ids at positions start to stop - 1, in order, in an array of the caller's own."""
        start, stop = _checked_range(start, stop, self.size)
        opening = start // BLOCK * BLOCK
        if stop <= opening + BLOCK:
            return self._block_of(opening)[start - opening : stop - opening].copy()
        ids = np.empty(stop - start, np.int64)
        for first in range(opening, stop, BLOCK):
            lower, upper = max(start, first), min(stop, first + BLOCK)
            ids[lower - start : upper - start] = self._block_of(first)[lower - first : upper - first]
        return ids

    def at(self, positions: ArrayLike) -> Ids:
        """Return the ids at any positions, in the order asked for, computed all at once."""
        wanted = _checked_positions(positions, self.size)
        if self.size <= BLOCK:
            return self._block_of(0)[wanted]
        return self._within(wanted.astype(np.uint64), self._forward)

    def position_of(self, sample: int) -> int:
        """Return when in the epoch this sample comes: the inverse of `self[position]`."""
        sample = _member("sample", sample, self.size)
        if self.size <= BLOCK:
            return int(np.flatnonzero(self._block_of(0) == sample)[0])
        return int(self._within(np.array([sample], np.uint64), self._backward)[0])

    def __getitem__(self, position: int) -> int:
        position = _member("position", position, self.size)
        place = position % BLOCK
        return int(self._block_of(position - place)[place])

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for first in range(0, self.size, BLOCK):
            yield from self.take(first, min(first + BLOCK, self.size)).tolist()

    def __reduce__(self) -> tuple[Any, ...]:
        return Permutation, (self.size, self.seed, self.epoch)

    def _block_of(self, first: int) -> Ids:
        """Return the block of ids that starts at position `first`, a multiple of BLOCK."""
        held, ids = self._block
        if held != first:
            positions = np.arange(first, min(first + BLOCK, self.size), dtype=np.uint64)
            if self.size <= BLOCK:
                ids = np.argsort(_hashed(positions, self._keys[0]), kind="stable").astype(np.int64)
            else:
                ids = self._within(positions, self._forward)
            self._block = (first, ids)
        return ids

    def _within(self, words: _Words, network: Callable[[_Words], _Words]) -> Ids:
        """Apply the network until nothing is outside range(size). A cycle that starts inside returns."""
        out = network(words)
        outside = np.flatnonzero(out >= np.uint64(self.size))
        while len(outside):
            out[outside] = network(out[outside])
            outside = outside[out[outside] >= np.uint64(self.size)]
        return out.astype(np.int64)

    def _forward(self, words: _Words) -> _Words:
        a, b = self._radices
        left = words // b
        right = words - left * b
        for key_of_left, key_of_right in zip(self._keys[::2], self._keys[1::2], strict=True):
            _add(left, _digits(right, key_of_left, a), a)
            _add(right, _digits(left, key_of_right, b), b)
        left *= b
        left += right
        return left

    def _backward(self, words: _Words) -> _Words:
        a, b = self._radices
        left = words // b
        right = words - left * b
        for key_of_left, key_of_right in zip(self._keys[-2::-2], self._keys[::-2], strict=True):
            _add(right, b - _digits(left, key_of_right, b), b)
            _add(left, a - _digits(right, key_of_left, a), a)
        left *= b
        left += right
        return left


@final
@dataclass(frozen=True, slots=True)
class InOrder:
    """The samples as they lie in the dataset, with the methods of `Permutation`."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", whole("size", self.size, 0, LARGEST_SIZE))

    def take(self, start: int, stop: int) -> Ids:
        start, stop = _checked_range(start, stop, self.size)
        return np.arange(start, stop, dtype=np.int64)

    def at(self, positions: ArrayLike) -> Ids:
        return _checked_positions(positions, self.size)

    def position_of(self, sample: int) -> int:
        return _member("sample", sample, self.size)

    def __getitem__(self, position: int) -> int:
        return _member("position", position, self.size)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


Order = Permutation | InOrder


def _round_keys(size: int, seed: int, epoch: int) -> _Words:
    facts = struct.pack("<QQQ", size, seed, epoch)
    digest = hashlib.blake2b(facts, digest_size=8 * _ROUNDS, person=b"paceline order 1").digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _hashed(words: _Words, key: np.uint64) -> _Words:
    """Return a hash whose upper bits are good; integers wrap around, in arrays without a warning."""
    out = words + key
    out *= _SPREAD
    out ^= out >> _HALF
    out *= _STIR
    return out


def _digits(words: _Words, key: np.uint64, radix: np.uint64) -> _Words:
    out = _hashed(words, key)
    out >>= _HASH_SHIFT
    out *= radix
    out >>= _DIGIT_SHIFT
    return out


def _add(digits: _Words, more: _Words, radix: np.uint64) -> None:
    """Set digits to (digits + more) mod radix, both below or at the radix: below it, the difference wraps
    around to something huge, and the smaller one is right either way."""
    digits += more
    np.minimum(digits, digits - radix, out=digits)


def _member(name: str, value: object, size: int) -> int:
    if not size:
        raise UsageError(f"{name}={value!r} of an order of no samples", remedy="check the dataset's length")
    return whole(name, value, 0, size - 1)


def _checked_range(start: int, stop: int, size: int) -> tuple[int, int]:
    if not (type(start) is int and type(stop) is int and 0 <= start <= stop <= size):
        stop = whole("stop", stop, 0, size)
        start = whole("start", start, 0, stop)
    return start, stop


def _checked_positions(positions: ArrayLike, size: int) -> Ids:
    given = np.asarray(positions)
    if given.size == 0:
        return np.empty(given.shape, np.int64)
    if given.dtype.kind not in "iu":
        raise UsageError(f"positions of type {given.dtype}", remedy="positions are whole numbers")
    lowest, highest = int(given.min()), int(given.max())
    if lowest < 0 or highest >= size:
        raise UsageError(
            f"positions from {lowest} to {highest} in an order of {counted(size, 'sample')}",
            remedy="positions count from 0 and end below the number of samples",
        )
    return given.astype(np.int64)
