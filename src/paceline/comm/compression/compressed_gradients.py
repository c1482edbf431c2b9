"""Gradients as they would travel: compressed once, by hand, outside of an all-reduce.

For looking at what a codec does to given gradients, and for sending them by a way of the caller's. There is
no error feedback here: what is lost is `gradients - compressed.decompress()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from paceline.comm.compression.error_feedback import Codec, Compression
from paceline.core.errors import UsageError
from paceline.core.wording import with_article

Gradients: TypeAlias = Tensor | np.ndarray[Any, Any] | Sequence[Any] | Mapping[str, Any]


@final
class CompressedGradients:
    """The bytes of one or several gradients under a codec.

    data          the bytes of each gradient, flat uint8 tensors, in order
    nbytes        how many bytes would travel
    original_nbytes  how many the gradients have
    """

    def __init__(self, codec: Codec, gradients: Gradients) -> None:
        self.codec = codec
        self._like = gradients
        self.data: tuple[Tensor, ...] = ()
        self.original_nbytes = 0
        self.compress(gradients)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() for part in self.data)

    def compress(self, gradients: Gradients) -> CompressedGradients:
        """Hold these gradients instead, of any shapes, under the same codec."""
        given = [_as_tensor(one) for one in _parts(gradients)]
        flat = [_flat(one) for one in given]
        self._like = gradients
        self.original_nbytes = sum(one.numel() * one.element_size() for one in given)
        compression = Compression(self.codec, error_feedback=False)
        encoded = []
        for number, one in enumerate(flat):
            # The transfer works on its argument in place.
            transfer = compression.open(one.clone(), str(number))
            encoded.append(transfer.encode(0, one.numel()))
            transfer.close()
        self.data = tuple(encoded)
        return self

    def decompress(self) -> Any:
        """Return what a receiver would have, in the kind and the shapes that were compressed."""
        decoded = iter(
            self._decoded(encoded, one) for encoded, one in zip(self.data, _parts(self._like), strict=True)
        )
        if isinstance(self._like, Mapping):
            return {name: next(decoded) for name in self._like}
        if isinstance(self._like, list | tuple) and not _is_numbers(self._like):
            return type(self._like)(decoded)
        only = next(decoded)
        return only.tolist() if isinstance(self._like, list | tuple) else only

    def _decoded(self, encoded: Tensor, like: Any) -> Any:
        given = _as_tensor(like)
        out = torch.empty(given.numel(), dtype=torch.float32, device=given.device)
        self.codec.decode(encoded, out)
        shaped = out.to(given.dtype).reshape(given.shape)
        return shaped if isinstance(like, Tensor) else shaped.numpy()

    def __repr__(self) -> str:
        return f"CompressedGradients({self.codec.name}, {self.nbytes} of {self.original_nbytes} bytes)"


def compress_gradients(codec: Codec, gradients: Gradients) -> CompressedGradients:
    """Compress a tensor, an array, a list of numbers, or a list or dict of tensors or arrays."""
    return CompressedGradients(codec, gradients)


def _parts(gradients: Any) -> list[Any]:
    if isinstance(gradients, Mapping):
        return list(gradients.values())
    if isinstance(gradients, list | tuple) and not _is_numbers(gradients):
        return list(gradients)
    return [gradients]


def _is_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _flat(gradient: Tensor) -> Tensor:
    """Return a gradient as the codecs take it: one row of 32 or 64 bits."""
    flat = gradient.reshape(-1)
    return flat if flat.dtype in (torch.float32, torch.float64) else flat.float()


def _as_tensor(gradient: Any) -> Tensor:
    if isinstance(gradient, list | tuple) and gradient:
        gradient = torch.tensor(gradient, dtype=torch.float32)
    if isinstance(gradient, np.ndarray) and gradient.dtype.kind == "f":
        gradient = torch.from_numpy(np.ascontiguousarray(gradient))
    if not isinstance(gradient, Tensor) or not gradient.is_floating_point() or gradient.is_sparse:
        of = f" of {gradient.dtype}" if isinstance(gradient, Tensor | np.ndarray) else ""
        raise UsageError(
            f"gradients to compress cannot be {with_article(gradient)}{of}",
            remedy="pass a tensor or array of floating-point numbers, or a list or dict of them",
        )
    return gradient.detach()
