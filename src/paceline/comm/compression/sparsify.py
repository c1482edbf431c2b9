"""Top-k sparsification: send the few largest elements, keep the rest for later.

Idea:    of n elements the k = max(1, ceil((1 - sparsity) * n)) largest by magnitude travel; everything else
         goes to the residual and travels once it has grown large enough. Among equals the lower index wins,
         on every device.
Travels: k float32 values, then k uint32 indices in ascending order: 8 k bytes, 2 % of the tensor at
         sparsity 0.99.
Costs:   selection. A sample guesses a threshold, one pass keeps what reaches it (a little more than k
         elements), and the exact selection runs on those alone; where the guess was bad it runs on
         everything. The result never depends on the guess.
Lost:    nothing of what travels, everything of what does not: useless without error feedback. NaN counts as
         larger than infinity, and both as larger than any number, so they are the first to be sent.
Exact:   decoded + residual == input, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from typing import final

import torch
from torch import Tensor

from paceline.comm.compression.base import typed_view
from paceline.core.errors import UsageError

_BYTES_PER_KEPT = 8
_MAX_NUMEL = 1 << 32
_MAGNITUDE_BITS = 0x7FFFFFFF
_INDEX_BITS = 0xFFFFFFFF
# Under this many elements the exact selection alone is faster than a sample and two more passes.
_SAMPLE_FROM = 1 << 16
# Odd and prime, so that the sample does not fall into step with the rows of a weight matrix.
_SAMPLE_STRIDE = 61
# How many times more elements than needed may reach the guess for a selection among them to pay off.
_CLOSE = 4


@final
@dataclass(frozen=True)
class TopK:
    """The codec of `sparsify_gradients`; `sparsity` is the share of elements that stay behind."""

    sparsity: float = 0.99
    _kept: Fraction = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not _is_number(self.sparsity) or not 0.0 <= self.sparsity < 1.0:
            raise UsageError(
                f"gradients cannot be sparsified with sparsity={self.sparsity!r}; "
                "allowed are numbers from 0 up to, but not including, 1",
                remedy="use sparsify_gradients(0.99) to send the largest 1 % of the elements",
            )
        object.__setattr__(self, "sparsity", float(self.sparsity))
        # The decimal number that was meant: in binary 0.01 of 1000 elements would be 11.
        object.__setattr__(self, "_kept", 1 - Fraction(repr(self.sparsity)))

    @property
    def name(self) -> str:
        return f"topk{self.sparsity!r}"

    def kept(self, numel: int) -> int:
        """Return how many of `numel` elements travel."""
        return max(1, math.ceil(self._kept * numel)) if numel else 0

    def encoded_bytes(self, numel: int) -> int:
        return _BYTES_PER_KEPT * self.kept(numel)

    def encode(self, values: Tensor) -> Tensor:
        numel = values.numel()
        if numel > _MAX_NUMEL:
            raise UsageError(
                f"top-k sparsification was given {numel} elements at once; its indices end at {_MAX_NUMEL}",
                remedy="reduce the tensor in smaller buckets",
            )
        kept = self.kept(numel)
        encoded = torch.empty(2 * kept, dtype=torch.float32, device=values.device)
        if kept:
            indices = _largest(values, kept)
            torch.index_select(values, 0, indices, out=encoded[:kept])
            encoded[kept:].view(torch.int32).copy_(indices)
        return encoded.view(torch.uint8)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        out.zero_()
        middle = encoded.numel() // 2
        values = typed_view(encoded[:middle], torch.float32)
        indices = typed_view(encoded[middle:], torch.int32).to(torch.int64) & _INDEX_BITS
        out.index_copy_(0, indices, values)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return the ascending indices of the `count` largest magnitudes, the first ones among equals."""
    # Without its sign bit a float orders like an integer, with NaN on top: no comparison can go astray.
    keys = values.view(torch.int32) & _MAGNITUDE_BITS
    if count == keys.numel():
        return torch.arange(count, device=keys.device)
    guess = _guess(keys, count)
    if guess is not None:
        reaching = keys >= guess
        reached = int(reaching.count_nonzero())
        if count <= reached <= max(_CLOSE * count, keys.numel() // 16):
            candidates = reaching.nonzero().squeeze(1)
            keys = keys[candidates]
            return candidates[_select(keys, count, _threshold(keys, count))]
        # Very many are equal to the guess, as in a gradient that is mostly zeros: it is the threshold itself.
        if count <= reached and int((keys > guess).count_nonzero()) < count:
            return _select(keys, count, guess)
    return _select(keys, count, _threshold(keys, count))


def _threshold(keys: Tensor, count: int) -> Tensor:
    return keys.topk(count, sorted=False).values.min()


def _select(keys: Tensor, count: int, threshold: Tensor) -> Tensor:
    """Return the indices of all keys above the threshold and of as many equal to it as make up `count`."""
    chosen = keys > threshold
    equal = (keys == threshold).nonzero().squeeze(1)
    chosen[equal[: count - int(chosen.count_nonzero())]] = True
    return chosen.nonzero().squeeze(1)


def _guess(keys: Tensor, count: int) -> Tensor | None:
    """Estimate from a sample a key that a little more than `count` keys reach; None if not worth it."""
    numel = keys.numel()
    if numel < _SAMPLE_FROM or _CLOSE * count > numel:
        return None
    sample = keys[::_SAMPLE_STRIDE]
    expected = count / _SAMPLE_STRIDE
    # Four standard deviations more than the expected number, so that the guess is hardly ever too high.
    rank = min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected) + 4))
    return sample.topk(rank, sorted=False).values.min()
