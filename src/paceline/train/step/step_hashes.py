"""Hashes of what a rank computes: of one shard's gradient, and of what the rank put into its latest steps.

The hash of a shard is what a worker reports to have computed, and a replay computes again. With those of the
latest steps the supervisor finds the first rank to differ when steps are computed again; of each step: the
shards of this rank, the sample of the weights that they were computed with (replica_agreement.py), and a hash
of some chunks of what this rank gave to the sum, with its losses. A weight that differs changes nearly all
gradients that depend on it, so that a part of them shows it, and costs microseconds. Needed only where the
sample of one step is not of all weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import torch
import xxhash
from torch import Tensor

from paceline.train.step.replica_agreement import host_bytes

CHUNKS: Final = 4
CHUNK_BYTES: Final = 4096


def shard_hash(gradients: Iterable[Tensor | None], scalars: Tensor | None = None) -> str:
    """Return the xxh3_128 over the gradients of the trained parameters in their order, then over the tail.

    Of each gradient: its kind ("none", "dense" or "sparse"), dtype and shape, a zero byte after each, and the
    raw bytes in row-major order; of a sparse one the rows' numbers and then their values, in the order of the
    rows. A missing gradient is not the same as zeros: no sample of the shard used that parameter. Quick, and
    not cryptographic.
    """
    digest = xxhash.xxh3_128()
    for gradient in gradients:
        if gradient is None:
            digest.update(b"none\0")
        elif gradient.is_sparse:
            rows = gradient.detach().coalesce()
            add_tensor(digest, "sparse", rows.indices())
            add_tensor(digest, "sparse", rows.values())
        else:
            add_tensor(digest, "dense", gradient)
    if scalars is not None:
        add_tensor(digest, "tail", scalars)
    return str(digest.hexdigest())


def add_tensor(digest: Any, label: str, tensor: Tensor) -> None:
    """Hash a label, the dtype and the shape, a zero byte after each, then the raw bytes, row by row."""
    shape = ",".join(str(side) for side in tensor.shape)
    digest.update(f"{label}\0{str(tensor.dtype).removeprefix('torch.')}\0{shape}\0".encode())
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if data.numel():
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)


def contribution(tensors: Iterable[Tensor]) -> str:
    """Hash evenly spaced chunks of flat host tensors; chunks, because single values would each miss the
    cache."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.detach().contiguous()  # named, so that it outlives the view of its memory
        memory = host_bytes(flat)
        apart = len(memory) // CHUNKS
        if apart <= CHUNK_BYTES:
            digest.update(memory)
            continue
        for place in range(0, CHUNKS * apart, apart):
            digest.update(memory[place : place + CHUNK_BYTES])
    return str(digest.hexdigest())


@final
class StepHashes:
    """Hashes of the most recent steps; keeps 2 x `parts`, so that every weight was sampled at least twice."""

    def __init__(self, parts: int) -> None:
        self.needed = parts > 1
        self._most = 2 * parts
        self._kept: dict[int, str] = {}

    def add(self, step: int, shards: Sequence[int], sample: str, contributed: str) -> None:
        if not self.needed or not contributed:
            return
        which = xxhash.xxh3_64(repr(tuple(shards)).encode()).hexdigest()
        self._kept[step] = f"{which}/{sample}/{contributed}"
        while len(self._kept) > self._most:
            del self._kept[min(self._kept)]

    def clear(self) -> None:
        """Forget all hashes: the state was replaced by one that this rank did not compute."""
        self._kept = {}

    @property
    def recent(self) -> tuple[tuple[int, str], ...]:
        return tuple(sorted(self._kept.items()))
