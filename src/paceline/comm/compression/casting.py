"""Half precision: send every number in 16 bits.

Idea:    round each float32 to the nearest fp16 or bf16, ties to even.
Travels: 2 bytes per element, nothing else.
Costs:   one pass to encode and one to decode; halves the bytes.
Lost:    fp16 keeps 11 significant bits down to 6e-5, ever fewer below, nothing under 3e-8, and saturates at
         65504; bf16 keeps 8 bits over the whole range of float32. A finite number never becomes an
         infinity: it saturates, and what was cut off is in the residual. Infinities and NaN arrive as
         NaN.
Exact:   decoded + residual == input, bit for bit, for all of bf16 and for fp16 up to 131008; beyond, up to
         the rounding of one float32 subtraction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from paceline.comm.compression.base import chunks, typed_view
from paceline.core.errors import UsageError

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@final
@dataclass(frozen=True)
class Cast:
    """The codec of `cast_gradients`; `name` is "fp16" or "bf16"."""

    name: str
    _dtype: torch.dtype = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in _DTYPES:
            raise UsageError(
                f"gradients cannot be cast to {self.name!r}; allowed are {', '.join(map(repr, _DTYPES))}",
                remedy='use cast_gradients("bf16") for range or cast_gradients("fp16") for precision',
            )
        object.__setattr__(self, "_dtype", _DTYPES[self.name])

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Tensor) -> Tensor:
        limit = torch.finfo(self._dtype).max
        halves = torch.empty(values.numel(), dtype=self._dtype, device=values.device)
        for start, stop in chunks(values.numel(), values.device):
            part = values[start:stop]
            # part - part is zero, or NaN where part is not finite: clamping alone would hide an infinity.
            halves[start:stop].copy_(part.clamp(-limit, limit).sub_(part - part))
        return halves.view(torch.uint8)

    def decode(self, encoded: Tensor, out: Tensor) -> None:
        out.copy_(typed_view(encoded, self._dtype))
