"""Gradient compression: fewer bytes per all-reduce, and nothing lost for good.

Casting, quantisation and sparsification are codecs, which work under any all-reduce algorithm; PowerSGD
averages small factors through one. All of them keep what they could not send (error feedback) and carry it
in their saved state.

This folder must not know ranks, transports, algorithms or models: it sees flat tensors, names and bytes.
"""

from __future__ import annotations

from numbers import Number
from typing import Any, overload

from paceline.comm.compression.codecs import DEFAULT_BLOCK, Cast, Quantize, TopK
from paceline.comm.compression.compressed_gradients import (
    CompressedGradients,
    Gradients,
    compress_gradients,
)
from paceline.comm.compression.error_feedback import Codec, Compression, EncodedTransfer
from paceline.comm.compression.powersgd import PowerSGD
from paceline.core.errors import UsageError

__all__ = [
    "Codec",
    "CompressedGradients",
    "Compression",
    "EncodedTransfer",
    "PowerSGD",
    "cast_gradients",
    "quantize_gradients",
    "sparsify_gradients",
]


@overload
def quantize_gradients(gradients: int = 8, num_bits: int | None = None, block: int = ...) -> Compression: ...
@overload
def quantize_gradients(
    gradients: Gradients, num_bits: int | None = None, block: int = ...
) -> CompressedGradients: ...
def quantize_gradients(
    gradients: Gradients | int = 8, num_bits: int | None = None, block: int = DEFAULT_BLOCK
) -> Compression | CompressedGradients:
    """Send integers of 8 or 4 bits with one float32 scale per `block` elements: 25 % or 13 % of the bytes.

    Without gradients this is a compression to reduce with; given gradients it compresses them.
    """
    if isinstance(gradients, int | float | Number | str) or gradients is None:
        return Compression(Quantize(_one_of("num_bits", gradients, num_bits, 8), block))
    return compress_gradients(Quantize(8 if num_bits is None else num_bits, block), gradients)


@overload
def sparsify_gradients(gradients: float = 0.99, sparsity: float | None = None) -> Compression: ...
@overload
def sparsify_gradients(gradients: Gradients, sparsity: float | None = None) -> CompressedGradients: ...
def sparsify_gradients(
    gradients: Gradients | float = 0.99, sparsity: float | None = None
) -> Compression | CompressedGradients:
    """Send the largest `1 - sparsity` of the elements with their positions: at 0.99, 2 % of the bytes.

    Without gradients this is a compression to reduce with; given gradients it compresses them.
    """
    if isinstance(gradients, int | float | Number | str) or gradients is None:
        return Compression(TopK(_one_of("sparsity", gradients, sparsity, 0.99)))
    return compress_gradients(TopK(0.99 if sparsity is None else sparsity), gradients)


@overload
def cast_gradients(gradients: str = "fp16", dtype: str | None = None) -> Compression: ...
@overload
def cast_gradients(gradients: Gradients, dtype: str | None = None) -> CompressedGradients: ...
def cast_gradients(
    gradients: Gradients | str = "fp16", dtype: str | None = None
) -> Compression | CompressedGradients:
    """Send "fp16" or "bf16": half of the bytes.

    Without gradients this is a compression to reduce with; given gradients it compresses them.
    """
    if isinstance(gradients, int | float | Number | str) or gradients is None:
        return Compression(Cast(_one_of("dtype", gradients, dtype, "fp16")))
    return compress_gradients(Cast("fp16" if dtype is None else dtype), gradients)


def _one_of(name: str, first: Any, by_name: Any, default: Any) -> Any:
    """Return the setting, which is the first argument or given by its name; the first is the default where
    the setting is named."""
    if by_name is None:
        return first
    if first not in (default, by_name):
        raise UsageError(f"{name}={by_name!r} and {first!r} are two settings", remedy=f"pass {name} once")
    return by_name
