"""Gradient compression: fewer bytes per all-reduce, and nothing lost for good.

Casting, quantisation and sparsification are codecs, which work under any all-reduce algorithm; PowerSGD
averages small factors through one. All of them keep what they could not send (error feedback) and carry it
in their saved state.

This folder must not know ranks, transports, algorithms or models: it sees flat tensors, names and bytes.
"""

from __future__ import annotations

from numbers import Number

from paceline.comm.compression.codecs import DEFAULT_BLOCK, Cast, Quantize, TopK
from paceline.comm.compression.error_feedback import Codec, Compression, EncodedTransfer
from paceline.comm.compression.powersgd import PowerSGD
from paceline.core.errors import UsageError

__all__ = [
    "Codec",
    "Compression",
    "EncodedTransfer",
    "PowerSGD",
    "cast_gradients",
    "quantize_gradients",
    "sparsify_gradients",
]


def quantize_gradients(num_bits: int = 8, block: int = DEFAULT_BLOCK) -> Compression:
    """Send integers of 8 or 4 bits with one float32 scale per `block` elements: 25 % or 13 % of the bytes."""
    _refuse_data("quantize_gradients", num_bits, "8")
    return Compression(Quantize(num_bits, block))


def sparsify_gradients(sparsity: float = 0.99) -> Compression:
    """Send the largest `1 - sparsity` of the elements with their positions: at 0.99, 2 % of the bytes."""
    _refuse_data("sparsify_gradients", sparsity, "0.99")
    return Compression(TopK(sparsity))


def cast_gradients(dtype: str = "fp16") -> Compression:
    """Send "fp16" or "bf16": half of the bytes."""
    _refuse_data("cast_gradients", dtype, '"fp16"')
    return Compression(Cast(dtype))


def _refuse_data(function: str, value: object, example: str) -> None:
    """Catch the natural mistake: these functions describe a compression, they are not given the gradients."""
    if isinstance(value, Number | str) or value is None:
        return
    shape = getattr(value, "shape", None)
    what = type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
    raise UsageError(
        f"{function} was given a {what}; it takes a setting such as {example} "
        "and returns a compression to reduce with",
        remedy=f"grads = ctx.all_reduce(grads, compression={function}({example}))",
    )
