"""The hash of one shard's gradient: what a worker says that it computed, and a replay computes again.

Must not know steps, shards or who asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import xxhash
from torch import Tensor


def shard_hash(gradients: Iterable[Tensor | None], tail: Tensor | None = None) -> str:
    """xxh3_128 over the gradients of the trained parameters in their order, then over the tail.

    Of each gradient: its kind ("none", "dense" or "sparse"), dtype and shape, a zero byte after each, and the
    raw bytes in row-major order; of a sparse one the rows' numbers and then their values, in the order of the
    rows. A missing gradient is not the same as zeros: no sample of the shard used that parameter. Quick, and
    no proof against anybody.
    """
    digest = xxhash.xxh3_128()
    for gradient in gradients:
        if gradient is None:
            digest.update(b"none\0")
        elif gradient.is_sparse:
            rows = gradient.detach().coalesce()
            _add(digest, "sparse", rows.indices())
            _add(digest, "sparse", rows.values())
        else:
            _add(digest, "dense", gradient)
    if tail is not None:
        _add(digest, "tail", tail)
    return str(digest.hexdigest())


def _add(digest: Any, kind: str, tensor: Tensor) -> None:
    shape = ",".join(str(side) for side in tensor.shape)
    digest.update(f"{kind}\0{str(tensor.dtype).removeprefix('torch.')}\0{shape}\0".encode())
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if data.numel():
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
