"""Short digests of tensors by name: whether ranks hold the same bytes, and whether a file's image has them.

Not a proof against an adversary: it tells apart what memory or arithmetic has changed. Must not know ranks,
nor when anything is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from paceline.checkpoint.sharing import share_of
from paceline.checkpoint.tensor_file import Layout


def digest_of(tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> str:
    """Of each tensor, in the order of the names: name, dtype, shape and the bytes in row-major order."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors if names is None else names):
        tensor = tensors[name].detach()
        _add_header(digest, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for part in _dense_parts(tensor) if tensor.numel() else ():
            data = part.resolve_conj().resolve_neg().cpu().contiguous()
            digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """What holds the numbers. A sparse tensor of a state is dense parts here already (train/sparse_state.py);
    ranks also compare what a run has before a file refuses it (a sparse buffer)."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.is_sparse:
        rows = tensor.coalesce()
        return [rows.indices(), rows.values()]
    return [tensor.to_dense()]


def share_digests(tensors: Mapping[str, Tensor], writers: int) -> list[str]:
    """The digest of what each of `writers` ranks writes of these tensors: every rank computes all of them."""
    return [digest_of(tensors, share_of(tensors, writer, writers)) for writer in range(writers)]


def combined(digests: Iterable[str]) -> str:
    """One digest of several, in their order."""
    return str(xxhash.xxh3_128("-".join(digests).encode()).hexdigest())


def image_digest(layout: Layout, image: memoryview, leave_out: Iterable[str] = ()) -> str:
    """What `digest_of` says of the tensors that lie in this image of a file."""
    digest, others = xxhash.xxh3_128(), set(leave_out)
    for entry in sorted(layout.entries, key=lambda one: one.name):
        if entry.name in others:
            continue
        _add_header(digest, entry.name, entry.dtype, tuple(entry.shape))
        if entry.stop > entry.start:
            digest.update(image[entry.start : entry.stop])
    return str(digest.hexdigest())


def _add_header(digest: Any, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    digest.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0".encode())
