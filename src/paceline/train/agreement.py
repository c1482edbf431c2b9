"""Whether all ranks hold the same weights: a sample of them with every step, and which rank is odd.

The sample travels in the ballot of the step's own exchange, as whole numbers that are summed exactly. Every
rank sees the same sums, so all of them find a difference in the same step, before that step is applied:

    n ranks with numbers h hold the same number exactly where  n * sum(h * h) == sum(h) ** 2

Those that took part are counted in it as well. The ballot of a rank without a shard in the step travels with
what ranks tell each other before the sum (step.py).

A model of at most `LEAST_BYTES` is looked at whole in every step, a larger one in parts, one part with each
step in turn, so that a difference that stays is found within `MOST_PARTS` steps (on a device within
`MOST_PARTS_OF_A_DEVICE`). Of the parameters only: buffers move while shards are computed, and are compared
with each checkpoint. Must not know what is done to the rank that is odd.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import torch
import xxhash
from torch import Tensor

from paceline.core.errors import PacelineError, ReplicasDifferError

LEAST_BYTES: Final = 1 << 18
MOST_PARTS: Final = 16
MOST_PARTS_OF_A_DEVICE: Final = 64
"""A device is so much faster than the way to the host that the same part would be felt there."""

_BITS: Final = 48
_DIGITS: Final = 6
NUMBERS: Final = 1 + 2 * _DIGITS
"""Numbers of a ballot that a sample takes."""

_EXACT: Final = 1 << 24  # whole numbers below it are summed exactly in fp32


class DifferError(Exception):
    """The samples of the ranks are not the same; every rank of the group raises it in the same step."""


@final
class Look:
    """A hash that was asked for. On a device it may not be computed yet: `value` waits for it."""

    def __init__(self, digest: xxhash.xxh3_64, host: Tensor | None = None, done: Any = None) -> None:
        self._digest, self._host, self._done = digest, host, done
        self._value: int | None = None

    @property
    def value(self) -> int:
        """A number of 48 bits."""
        if self._value is None:
            if self._done is not None:
                self._done.synchronize()
            if self._host is not None:
                self._digest.update(self._host.numpy().data)
            self._value = int(self._digest.intdigest()) % (1 << _BITS)
            self._host = self._done = None  # the memory is that of the next look
        return self._value


@final
class WeightSample:
    """A hash of a part of these tensors, chosen by the step. Of a device's tensors the part is gathered there
    and copied to the host while other work goes on; reading the hash waits for the copy. Tensors
    that are no plain memory are left out. `gathers`: treat those of the host like those of a device."""

    def __init__(self, parameters: Iterable[Tensor], *, gathers: bool = False) -> None:
        self._tensors = [one for one in parameters if _is_plain(one)]
        self._sizes = [one.numel() * one.element_size() for one in self._tensors]
        self._seen: list[tuple[int, memoryview] | None] = [None] * len(self._tensors)
        self._flat: dict[tuple[int, int, int], tuple[int, Tensor]] = {}
        self._gathers = gathers
        self._hosts: list[Tensor | None] = [None, None]
        self._under_way: list[Look | None] = [None, None]
        # Whether no device has to be waited for.
        self.at_hand = not any(self._is_gathered(one) for one in self._tensors)
        total = sum(self._sizes)
        length = max(LEAST_BYTES, -(-total // (MOST_PARTS if self.at_hand else MOST_PARTS_OF_A_DEVICE)))
        self.parts = max(1, -(-total // length))
        self._pieces = [self._cut(part * length, (part + 1) * length) for part in range(self.parts)]

    def of(self, step: int) -> int:
        """The hash of the part that belongs to this step, as a number of 48 bits."""
        return self.look(step).value

    def look(self, step: int) -> Look:
        """The same, of the tensors as they are now, or as they will be after what is queued on the device."""
        digest, gathered = xxhash.xxh3_64(), []
        for index, start, stop in self._pieces[step % self.parts]:
            if self._is_gathered(self._tensors[index]):
                gathered.append(self._on_device(index, start, stop))
            else:
                digest.update(self._bytes(index)[start:stop])
        return self._copied(digest, gathered) if gathered else Look(digest)

    def _copied(self, digest: xxhash.xxh3_64, gathered: Sequence[Tensor]) -> Look:
        """One copy to the host of all that was gathered. Two places take turns: a look that has not been
        taken when its place is needed is taken first."""
        host, before = self._hosts.pop(0), self._under_way.pop(0)
        if before is not None:
            _ = before.value
        part = torch.cat(list(gathered)) if len(gathered) > 1 else gathered[0]
        on_cuda = part.device.type == "cuda"
        if host is None or host.numel() < part.numel():
            host = torch.empty(part.numel(), dtype=torch.uint8, pin_memory=on_cuda)
        target = host[: part.numel()]
        target.copy_(part, non_blocking=on_cuda)
        done = torch.cuda.current_stream(part.device).record_event() if on_cuda else None
        look = Look(digest, target, done)
        self._hosts.append(host)
        self._under_way.append(look)
        return look

    def _on_device(self, index: int, start: int, stop: int) -> Tensor:
        """A piece of a tensor, as bytes. Kept from step to step, like the views of the host's memory."""
        tensor = self._tensors[index].detach()
        address, seen = tensor.data_ptr(), self._flat.get((index, start, stop))
        if seen is not None and seen[0] == address:
            return seen[1]
        piece = tensor.contiguous().reshape(-1).view(torch.uint8)[start:stop]
        if tensor.is_contiguous():
            self._flat[index, start, stop] = (address, piece)
        return piece

    def _is_gathered(self, tensor: Tensor) -> bool:
        return self._gathers or not tensor.is_cpu

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
        address, seen = tensor.data_ptr(), self._seen[index]
        if seen is not None and seen[0] == address:
            return seen[1]
        if not tensor.is_contiguous():
            return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        view = host_bytes(tensor)
        self._seen[index] = (address, view)
        return view


def host_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host, of any dtype; not to be kept longer than the tensor."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _is_plain(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def text(sample: int) -> str:
    """As it stands in the journal."""
    return f"{sample:012x}"


def ballot(sample: int, world: int) -> list[int]:
    """The numbers that a rank of `world` adds to the ballot."""
    base = _base(world)
    digits = [digit % base for digit in sample.to_bytes(_DIGITS, "little")]
    return [1, *digits, *[digit * digit for digit in digits]]


def are_equal(sums: Sequence[int]) -> bool:
    """Whether all ranks that took part, which are counted, added the same numbers."""
    count, plain, squares = sums[0], sums[1 : 1 + _DIGITS], sums[1 + _DIGITS :]
    return [count * square for square in squares] == [one * one for one in plain]


@functools.cache
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
