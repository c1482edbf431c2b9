"""Whether all ranks hold the same weights: a sample of them with every step, and which rank is odd.

The sample travels in the ballot of the step's own exchange, as whole numbers that are summed exactly. Every
rank sees the same sums, so all of them find a difference in the same step, before that step is applied:

    n ranks with numbers h hold the same number exactly where  n * sum(h * h) == sum(h) ** 2

Those that took part are counted in it as well. The ballot of a rank without a shard in the step travels with
what ranks tell each other before the sum (step.py).

A model of at most `LEAST_BYTES` is looked at whole in every step, a larger one in parts, one part with each
step in turn, so that a difference that stays is found within `MOST_PARTS` steps. Of the parameters only:
buffers move while shards are computed, and are compared with each checkpoint. Must not know what is done to
the rank that is odd.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
import xxhash
from torch import Tensor

from paceline.core.errors import PacelineError, ReplicasDifferError

LEAST_BYTES: Final = 1 << 20
MOST_PARTS: Final = 16
_BITS: Final = 48
_DIGITS: Final = 6
NUMBERS: Final = 1 + 2 * _DIGITS
"""Numbers of a ballot that a sample takes."""

_EXACT: Final = 1 << 24  # whole numbers below it are summed exactly in fp32


class DifferError(Exception):
    """The samples of the ranks are not the same; every rank of the group raises it in the same step."""


@final
class WeightSample:
    """A hash of a part of these tensors, chosen by the step. Tensors of other devices, and those that are no
    plain memory, are left out: reading them would make every step wait for the device."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._tensors = [one for one in parameters if _is_plain(one)]
        self._sizes = [one.numel() * one.element_size() for one in self._tensors]
        self._seen: list[tuple[int, memoryview] | None] = [None] * len(self._tensors)
        total = sum(self._sizes)
        length = max(LEAST_BYTES, -(-total // MOST_PARTS))
        self.parts = max(1, -(-total // length))
        self._pieces = [self._cut(part * length, (part + 1) * length) for part in range(self.parts)]

    def of(self, step: int) -> int:
        """The hash of the part that belongs to this step, as a number of 48 bits."""
        digest = xxhash.xxh3_64()
        for index, start, stop in self._pieces[step % self.parts]:
            digest.update(self._bytes(index)[start:stop])
        return int(digest.intdigest()) % (1 << _BITS)

    def _cut(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Which bytes of which tensors lie between two places of all of them in a row."""
        pieces, begin = [], 0
        for index, size in enumerate(self._sizes):
            start, stop = max(first - begin, 0), min(last - begin, size)
            if start < stop:
                pieces.append((index, start, stop))
            begin += size
        return pieces

    def _bytes(self, index: int) -> memoryview:
        """The tensor's memory. Kept from step to step: making a view takes longer than hashing a small one.
        The address is asked for each time, so that memory that was given back is never read."""
        tensor = self._tensors[index]
        if not tensor.is_cpu:
            return memoryview(b"")  # it was moved to a device since
        address, seen = tensor.data_ptr(), self._seen[index]
        if seen is not None and seen[0] == address:
            return seen[1]
        if not tensor.is_contiguous():
            return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        size = tensor.numel() * tensor.element_size()
        view = memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")
        self._seen[index] = (address, view)
        return view


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    strided = tensor.layout is torch.strided
    return plain and strided and tensor.device.type == "cpu" and tensor.numel() > 0


def text(sample: int) -> str:
    """As it stands in the journal."""
    return f"{sample:012x}"


def ballot(sample: int, world: int) -> list[int]:
    """The numbers that a rank of `world` adds to the ballot."""
    base = _base(world)
    digits = [(sample >> (8 * place)) % base for place in range(_DIGITS)]
    return [1, *digits, *(digit * digit for digit in digits)]


def are_equal(sums: Sequence[int]) -> bool:
    """Whether all ranks that took part, which are counted, added the same numbers."""
    count, plain, squares = sums[0], sums[1 : 1 + _DIGITS], sums[1 + _DIGITS :]
    return all(count * square == one * one for one, square in zip(plain, squares, strict=True))


def _base(world: int) -> int:
    """Digits below it can be squared and summed over all ranks exactly."""
    base = 256
    while base > 2 and world * (base - 1) ** 2 >= _EXACT:
        base //= 2
    return base


def odd_ranks(digests: Sequence[str]) -> list[int] | None:
    """The ranks that do not hold what more than half of them hold; None where no digest has a majority."""
    digest, count = Counter(digests).most_common(1)[0]
    if 2 * count <= len(digests):
        return None
    return [rank for rank, mine in enumerate(digests) if mine != digest]


def differ_error(step: int, digests: Sequence[str]) -> PacelineError:
    """Where no supervisor decides what follows: who is odd, and what to do."""
    odd = odd_ranks(digests)
    if odd is None:
        groups = Counter(digests)
        what = (
            f"the {len(digests)} ranks hold {len(groups)} different states, and no majority says who is right"
        )
    else:
        names = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
        what = f"{names} {'have' if len(odd) > 1 else 'has'} other weights than the other ranks"
    return ReplicasDifferError(f"after step {step} {what}", ranks=odd or range(len(digests)))
