"""The codecs: half precision, small integers with a scale per block, and the few largest elements.

Each class states its idea, what travels, what it costs, what is lost, and what is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Real
from typing import final

import torch
from torch import Tensor

from paceline.comm.compression.error_feedback import chunks, typed_view
from paceline.core.errors import UsageError

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}

DEFAULT_BLOCK = 256

_LEVELS = {8: 127.0, 4: 7.0}
_SCALE_BYTES = 4
# Adding 1.5 * 2**23 rounds a float32 to an integer, ties to even, and leaves it in the low bits. Unlike a
# conversion, reading those bits is defined for NaN as well.
_ROUNDER = 12582912.0
_SMALLEST_NORMAL = 2.0**-126

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
class Cast:
    """Half precision: send every number in 16 bits.

    Idea:    round each float32 to the nearest fp16 or bf16, ties to even.
    Travels: 2 bytes per element, nothing else.
    Costs:   one pass to encode and one to decode; halves the bytes.
    Lost:    fp16 keeps 11 significant bits down to 6e-5, ever fewer below, nothing under 3e-8, and saturates
             at 65504; bf16 keeps 8 bits over the whole range of float32. A finite number never becomes an
             infinity: it saturates, and what was cut off is in the residual. Infinities and NaN arrive as
             NaN.
    Exact:   decoded + residual == input, bit for bit, for all of bf16 and for fp16 up to 131008; beyond, up
             to the rounding of one float32 subtraction.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in _HALVES:
            raise UsageError(
                f"gradients cannot be cast to {self.name!r}; allowed are {', '.join(map(repr, _HALVES))}",
                remedy='use cast_gradients("bf16") for range or cast_gradients("fp16") for precision',
            )

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        dtype = _HALVES[self.name]
        limit = torch.finfo(dtype).max
        halves = torch.empty(values.numel(), dtype=dtype, device=values.device)
        for start, stop in chunks(values.numel(), values.device):
            part = values[start:stop]
            # part - part is zero, or NaN where part is not finite: clamping alone would hide an infinity.
            halves[start:stop].copy_(part.clamp(-limit, limit).sub_(part - part))
        return halves.view(torch.uint8)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(typed_view(encoded, _HALVES[self.name]))


@final
@dataclass(frozen=True)
class Quantize:
    """Quantisation: send small integers, and one scale per block of elements.

    Idea:    in each block of (by default) 256 elements the largest magnitude becomes 127 (8 bits) or 7 (4
             bits), and every element is rounded to the nearest multiple of block maximum / 127 or / 7, ties
             to even. Symmetric: zero stays zero.
    Travels: the scales, then the integers. A scale is a float32: fp16 scales would save another 0.8 % at 8
             bits and lose every block whose scale is under 6e-8, which late in training is an ordinary
             gradient. Integers take one byte, or half a byte: the first half of a block in the low nibbles,
             the second half in the high ones, so that packing works on whole vectors. In all 4 * ceil(n /
             block) + n bytes, or 4 * ceil(n / block) + ceil(n / 2).
    Costs:   three passes over the data to encode and one to decode.
    Lost:    at most half a step per element: 1/254 of the block's maximum with 8 bits, 1/14 with 4. Blocks
             whose maximum is under 1.5e-36 are sent as zeros. A block that holds a NaN or an infinity arrives
             as NaN throughout.
    Exact:   decoded + residual == input up to the rounding of one float32 subtraction.
    """

    num_bits: int = 8
    block: int = DEFAULT_BLOCK

    def __post_init__(self) -> None:
        if type(self.num_bits) is not int or self.num_bits not in _LEVELS:
            raise UsageError(
                f"gradients cannot be quantised to num_bits={self.num_bits!r}; allowed are 8 and 4",
                remedy="use quantize_gradients(8), or quantize_gradients(4) for half the bytes",
            )
        if type(self.block) is not int or self.block < 2 or self.block % 2:
            raise UsageError(
                f"gradients cannot be quantised with block={self.block!r}; allowed are even integers from 2",
                remedy=f"leave block at {DEFAULT_BLOCK}, or use a smaller one for more precision",
            )

    @property
    def name(self) -> str:
        return f"int{self.num_bits}" + ("" if self.block == DEFAULT_BLOCK else f"b{self.block}")

    def encoded_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + self._code_bytes(numel)

    def encode(self, values: Tensor) -> Tensor:
        numel = values.numel()
        encoded = torch.empty(self.encoded_bytes(numel), dtype=torch.uint8, device=values.device)
        for rows, scales, codes in self._blocks(values, encoded):
            self._encode_rows(rows, scales, codes)
        return encoded

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        for rows, scales, codes in self._blocks(out, encoded):
            if self.num_bits == 8:
                rows.copy_(codes)
            else:
                half = codes.shape[1]
                rows[:, :half].copy_((codes << 4) >> 4)
                rows[:, half:].copy_(codes[:, : rows.shape[1] - half] >> 4)
            rows.mul_(scales.unsqueeze(1))

    def _encode_rows(self, rows: Tensor, scales: Tensor, codes: Tensor) -> None:
        levels = _LEVELS[self.num_bits]
        top = rows.abs().amax(dim=1)
        # Under this the scale would be subnormal, too coarse to bring the maximum back under `levels`.
        negligible = top < levels * _SMALLEST_NORMAL
        # top - top is zero, or NaN where the block holds anything that is not finite.
        # Multiplied, not divided: CUDA divides by a number differently, and the bytes must be the same.
        # Divided, the scale of the largest float32 would also be rounded up, and decode to an infinity.
        steps = (top * (1.0 / levels)).add_(top - top)
        scales.copy_(steps.masked_fill_(negligible, 0.0))
        factors = (levels / top).masked_fill_(negligible, 0.0)
        integers = (rows * factors.unsqueeze(1)).add_(_ROUNDER).view(torch.int32)
        if self.num_bits == 8:
            codes.copy_(integers)
            return
        half = codes.shape[1]
        packed = integers[:, :half] & 15
        packed[:, : rows.shape[1] - half] |= integers[:, half:] << 4
        codes.copy_(packed)

    def _blocks(self, values: Tensor, encoded: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Cut elements and bytes into views that match: rows of one block each, their scales, their codes.

        A short last block is a matrix of one row.
        """
        numel = values.numel()
        scale_bytes = self._scale_bytes(numel)
        scales = typed_view(encoded[:scale_bytes], torch.float32)
        codes = encoded[scale_bytes:].view(torch.int8)
        whole = numel - numel % self.block
        pieces = [(start, stop, self.block) for start, stop in chunks(whole, values.device, self.block)]
        if whole < numel:
            pieces.append((whole, numel, numel - whole))
        return [
            (
                values[start:stop].view(-1, width),
                scales[start // self.block : -(-stop // self.block)],
                codes[self._code_bytes(start) : self._code_bytes(stop)].view(-1, self._code_bytes(width)),
            )
            for start, stop, width in pieces
        ]

    def _scale_bytes(self, numel: int) -> int:
        return _SCALE_BYTES * -(-numel // self.block)

    def _code_bytes(self, numel: int) -> int:
        return numel if self.num_bits == 8 else (numel + 1) // 2


@final
@dataclass(frozen=True)
class TopK:
    """Top-k sparsification: send the few largest elements, keep the rest for later.

    Idea:    of n elements the k = max(1, ceil((1 - sparsity) * n)) largest by magnitude travel; everything
             else goes to the residual and travels once it has grown large enough. Among equals the lower
             index wins, on every device.
    Travels: k float32 values, then k uint32 indices in ascending order: 8 k bytes, 2 % of the tensor at
             sparsity 0.99.
    Costs:   selection. A sample guesses a threshold, one pass keeps what reaches it (a little more than k
             elements), and the exact selection runs on those alone; where the guess was bad it runs on
             everything. The result never depends on the guess.
    Lost:    nothing of what travels, everything of what does not: useless without error feedback. NaN counts
             as larger than infinity, and both as larger than any number, so they are the first to be sent.
    Exact:   decoded + residual == input, bit for bit.
    """

    sparsity: float = 0.99
    _kept: Fraction = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given: object = self.sparsity
        number = isinstance(given, Real) and not isinstance(given, bool)
        if not number or not 0.0 <= self.sparsity < 1.0:
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
