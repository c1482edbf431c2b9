"""Check that all ranks hold the same weights, by a sample of them with every step; name those that differ.

The sample travels with the counters of the step's own exchange, as whole numbers that are summed exactly.
Every rank sees the same sums, so all of them find a difference in the same step, before that step is applied:

    n ranks with numbers h hold the same number exactly where  n * sum(h * h) == sum(h) ** 2

Ranks that took part are counted in it as well. The counters of a rank without a shard in the step travel with
what ranks exchange before the sum (transaction.py).

A model of at most `LEAST_BYTES` is looked at whole in every step, a larger one in parts, one part with each
step in turn, so that a difference that stays is found within `MOST_PARTS` steps (on a device within
`MOST_PARTS_OF_A_DEVICE`). Of the parameters only: buffers move while shards are computed, and are compared
with each checkpoint.

A rank that is the only one left can compare only with itself: `WeightWatch`.
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
from paceline.core.wording import ranks

LEAST_BYTES: Final = 1 << 18
MOST_PARTS: Final = 16
MOST_PARTS_OF_A_DEVICE: Final = 64
"""A device is so much faster than the way to the host that the same part would be felt there."""

_BITS: Final = 48
_DIGITS: Final = 6
SAMPLE_COUNTERS: Final = 1 + 2 * _DIGITS
"""Counters of a step's exchange that a sample takes."""

_EXACT: Final = 1 << 24  # whole numbers below it are summed exactly in fp32

QUIET_STEPS: Final = 4
"""Steps in groups that agreed, without a write past torch, before a change counts as damaged memory."""


class WeightsDifferError(Exception):
    """The samples of the ranks are not the same; every rank of the group raises it in the same step."""


@final
class SampleRead:
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
            self._host = self._done = None  # the memory is that of the next read
        return self._value


@final
class WeightSample:
    """A hash of a part of these tensors, chosen by the step. Of a device's tensors the part is gathered there
    and copied to the host in the background; reading the hash waits for the copy. Tensors
    that are no plain memory are left out. `gathers`: treat those of the host like those of a device."""

    def __init__(self, parameters: Iterable[Tensor], *, gathers: bool = False) -> None:
        plain = [
            tensor
            for tensor in parameters
            if type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_meta
        ]
        self._tensors = [tensor for tensor in plain if tensor.layout is torch.strided and tensor.numel()]
        self._sizes = [tensor.numel() * tensor.element_size() for tensor in self._tensors]
        self._seen: list[tuple[int, memoryview] | None] = [None] * len(self._tensors)
        self._flat: dict[tuple[int, int, int], tuple[int, Tensor]] = {}
        self._gathers = gathers
        self._hosts: list[Tensor | None] = [None, None]
        self._under_way: list[SampleRead | None] = [None, None]
        # Whether no device has to be waited for.
        self.at_hand = not any(self._is_gathered(tensor) for tensor in self._tensors)
        total = sum(self._sizes)
        length = max(LEAST_BYTES, -(-total // (MOST_PARTS if self.at_hand else MOST_PARTS_OF_A_DEVICE)))
        self.parts = max(1, -(-total // length))
        self._pieces = [self._cut(part * length, (part + 1) * length) for part in range(self.parts)]

    def of(self, step: int) -> int:
        """Return the hash of the part that belongs to this step, as a number of 48 bits."""
        return self.start_hash(step).value

    def start_hash(self, step: int) -> SampleRead:
        """Start hashing this step's part; `.value` waits for the device. The tensors are hashed as they are
        now, or after the work that is queued on the device."""
        digest, gathered = xxhash.xxh3_64(), []
        for index, start, stop in self._pieces[step % self.parts]:
            if self._is_gathered(self._tensors[index]):
                gathered.append(self._on_device(index, start, stop))
            else:
                digest.update(self._bytes(index)[start:stop])
        return self._copied(digest, gathered) if gathered else SampleRead(digest)

    def _copied(self, digest: xxhash.xxh3_64, gathered: Sequence[Tensor]) -> SampleRead:
        """Return one copy to the host of all gathered pieces. Two buffers alternate: a hash that was not
        taken when its buffer is needed is taken first."""
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
        read = SampleRead(digest, target, done)
        self._hosts.append(host)
        self._under_way.append(read)
        return read

    def _on_device(self, index: int, start: int, stop: int) -> Tensor:
        """Return a piece of a tensor as bytes. Kept from step to step, like the views of host memory."""
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
        """Return which bytes of which tensors lie between two places of all of them in a row."""
        pieces, begin = [], 0
        for index, size in enumerate(self._sizes):
            start, stop = max(first - begin, 0), min(last - begin, size)
            if start < stop:
                pieces.append((index, start, stop))
            begin += size
        return pieces

    def _bytes(self, index: int) -> memoryview:
        """Return the tensor's memory. Kept from step to step: making a view takes longer than hashing a small
        one. The address is compared each time, so that freed memory is never read."""
        tensor = self._tensors[index]
        address, seen = tensor.data_ptr(), self._seen[index]
        if seen is not None and seen[0] == address:
            return seen[1]
        if not tensor.is_contiguous():
            return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        view = host_bytes(tensor)
        self._seen[index] = (address, view)
        return view


@final
class WeightWatch:
    """Check that this rank's weights are still what its last update left there, by a hash taken after it.

    A change since then that torch has not counted (every write through torch increments a tensor's version)
    is damage to memory, unless user code writes past torch, through `parameter.data`. Such code shows itself:
    in a group its writes happen on all ranks alike, so the ranks agree on weights that differ from the hash.
    One such step ends these conclusions for good; and before QUIET_STEPS steps in a group have passed without
    one, none are drawn. The hash is of the part that the next sample covers: everything in small models.
    """

    def __init__(self, sample: WeightSample, parameters: Iterable[Tensor]) -> None:
        self._sample, self._parameters = sample, list(parameters)
        self._left: tuple[int, SampleRead, int] | None = None  # step, hash, writes by torch
        self._quiet = 0
        self._written_past = False

    def leave(self, step: int, *, alone: bool) -> SampleRead | None:
        """Take the hash of the weights after the update that commits `step`; None: it would not be used."""
        self._left = None
        if alone and not self._is_trusted:
            return None
        read = self._sample.start_hash(step)
        self._left = (step, read, self._writes())
        return read

    def left(self, step: int) -> int | None:
        """Return the hash taken after the update of `step`, if it is known without waiting for a device."""
        if self._left is None or self._left[0] != step or not self._sample.at_hand:
            return None
        return self._left[1].value

    def forget(self) -> None:
        """Drop the hash: the weights were replaced on purpose."""
        self._left = None

    def agreed(self, step: int, sample: int) -> None:
        """Note that all ranks hold this sample: a difference to the hash was written by user code on all."""
        if self._differs(step, sample):
            self._written_past = True
        elif self._left is not None:
            self._quiet += 1

    def has_changed(self, step: int, sample: int | None = None) -> bool:
        """Return whether the weights differ from the result of the update of `step`, unexplained by user
        code."""
        if not self._is_trusted or self._left is None or self._left[0] != step:
            return False
        return self._differs(step, self._sample.of(step) if sample is None else sample)

    @property
    def _is_trusted(self) -> bool:
        return self._quiet >= QUIET_STEPS and not self._written_past

    def _differs(self, step: int, sample: int) -> bool:
        if self._left is None:
            return False
        left, read, writes = self._left
        return left == step and read.value != sample and writes == self._writes()

    def _writes(self) -> int:
        """Return how often torch has written to the parameters: a change without a count is what is looked
        for."""
        return sum(one._version for one in self._parameters)


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor, of any dtype; not to be kept longer than the tensor."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def to_hex(sample: int) -> str:
    """Format a weight sample as hex digits, as in the journal."""
    return f"{sample:012x}"


def counters(sample: int, world: int) -> list[int]:
    """Return the counters that a rank of `world` adds to the exchange."""
    base = _base(world)
    digits = [digit % base for digit in sample.to_bytes(_DIGITS, "little")]
    return [1, *digits, *[digit * digit for digit in digits]]


def are_equal(sums: Sequence[int]) -> bool:
    """Return whether all ranks that took part, which are counted, added the same numbers.

    Cauchy-Schwarz: n * sum(h * h) >= sum(h) ** 2, with equality exactly where all h are equal. So the sums
    alone tell, digit by digit, and all ranks come to the same answer without another exchange.
    """
    count, plain, squares = sums[0], sums[1 : 1 + _DIGITS], sums[1 + _DIGITS :]
    return [count * square for square in squares] == [one * one for one in plain]


@functools.cache
def _base(world: int) -> int:
    """Return the base of a sample's digits, which can be squared and summed over all ranks exactly."""
    base = 256
    while base > 2 and world * (base - 1) ** 2 >= _EXACT:
        base //= 2
    return base


def odd_ranks(digests: Sequence[str]) -> list[int] | None:
    """Return the ranks that do not hold what a majority holds; None where no digest has a majority."""
    digest, count = Counter(digests).most_common(1)[0]
    if 2 * count <= len(digests):
        return None
    return [rank for rank, mine in enumerate(digests) if mine != digest]


def differ_error(step: int, digests: Sequence[str]) -> PacelineError:
    """Return the error of a run without a supervisor: which ranks differ, and what to do."""
    odd = odd_ranks(digests)
    if odd is None:
        groups = Counter(digests)
        what = (
            f"the {len(digests)} ranks hold {len(groups)} different states, and no majority says which rank "
            "is right"
        )
    else:
        what = f"{ranks(odd, 'has', 'have', all_named=True)} other weights than the other ranks"
    return ReplicasDifferError(f"after step {step} {what}", ranks=odd or range(len(digests)))
