"""Quantisation: send small integers, and one scale per block of elements.

Idea:    in each block of (by default) 256 elements the largest magnitude becomes 127 (8 bits) or 7 (4
         bits), and every element is rounded to the nearest multiple of block maximum / 127 or / 7, ties to
         even. Symmetric: zero stays zero.
Travels: the scales, then the integers. A scale is a float32: fp16 scales would save another 0.8 % at 8 bits
         and lose every block whose scale is under 6e-8, which late in training is an ordinary gradient.
         Integers take one byte, or half a byte: the first half of a block in the low nibbles, the second
         half in the high ones, so that packing works on whole vectors. In all 4 * ceil(n / block) + n
         bytes, or 4 * ceil(n / block) + ceil(n / 2).
Costs:   three passes over the data to encode and one to decode.
Lost:    at most half a step per element: 1/254 of the block's maximum with 8 bits, 1/14 with 4. Blocks
         whose maximum is under 1.5e-36 are sent as zeros. A block that holds a NaN or an infinity arrives
         as NaN throughout.
Exact:   decoded + residual == input up to the rounding of one float32 subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from paceline.comm.compression.base import chunks, typed_view
from paceline.core.errors import UsageError

DEFAULT_BLOCK = 256

_LEVELS = {8: 127.0, 4: 7.0}
_SCALE_BYTES = 4
# Adding 1.5 * 2**23 rounds a float32 to an integer, ties to even, and leaves it in the low bits. Unlike a
# conversion, reading those bits is defined for NaN as well.
_ROUNDER = 12582912.0
_SMALLEST_NORMAL = 2.0**-126


@final
@dataclass(frozen=True)
class Quantize:
    """The codec of `quantize_gradients`."""

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
        # Multiplied, not divided: CUDA divides by a number in its own way, and the bytes are to be the same.
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
