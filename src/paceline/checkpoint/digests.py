"""Division of tensors among the ranks that write them, and short digests of tensors by name: whether ranks
hold the same bytes, and whether a file's image has them.

Not a proof against an adversary: it detects what memory or arithmetic has changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from paceline.checkpoint.tensor_file import TensorFileLayout
from paceline.core.errors import UsageError


def digest_of(tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> str:
    """Hash name, dtype, shape and row-major bytes of each tensor, in the order of the names."""
    digest = xxhash.xxh3_128()
    for name in sorted(tensors if names is None else names):
        tensor = tensors[name].detach()
        _add_header(digest, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for part in _dense_parts(tensor) if tensor.numel() else ():
            data = part.resolve_conj().resolve_neg().cpu().contiguous()
            digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def _dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return what holds the numbers. A sparse tensor of a state is dense parts here already
    (`sparse_parts`); ranks also compare what a run has before a file refuses it (a sparse buffer)."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.is_sparse:
        rows = tensor.coalesce()
        return [rows.indices(), rows.values()]
    return [tensor.to_dense()]


def share_digests(tensors: Mapping[str, Tensor], writers: int) -> list[str]:
    """Return the digest of what each of `writers` ranks writes; every rank computes all of them."""
    return [digest_of(tensors, share_of(tensors, writer, writers)) for writer in range(writers)]


def combined(digests: Iterable[str]) -> str:
    """Return one digest of several, in their order."""
    return str(xxhash.xxh3_128("-".join(digests).encode()).hexdigest())


def image_digest(layout: TensorFileLayout, image: memoryview, leave_out: Iterable[str] = ()) -> str:
    """Return the `digest_of` the tensors that lie in this image of a file."""
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


def share_of(tensors: Mapping[str, Tensor], part: int, parts: int) -> list[str]:
    """Return the names in part `part` of `parts`: whole tensors, balanced by bytes, largest first.

    Every rank computes the same division, from names and sizes alone, whatever the order of the mapping.
    """
    if not 0 <= part < parts:
        raise UsageError(f"part {part} of {parts}", remedy="give 0 <= part < parts")
    found = [(name, require_tensor(name, tensor)) for name, tensor in tensors.items()]
    sizes = sorted((-tensor.numel() * tensor.element_size(), name) for name, tensor in found)
    loads = [(0, index) for index in range(parts)]
    mine: list[str] = []
    for negative, name in sizes:
        load, index = heapq.heappop(loads)
        heapq.heappush(loads, (load - negative, index))
        if index == part:
            mine.append(name)
    return sorted(mine)


def require_tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{name!r} is a {type(value).__name__}, not a tensor", remedy="put plain values into the state"
        )
    return value
