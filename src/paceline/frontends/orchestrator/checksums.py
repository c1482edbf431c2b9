"""Checksums of parts of the data: XXH3 over the bytes of their samples.

Data in memory (tensors, arrays, mapped files) has them; data that is made while it is read has none, because
reading it twice may give two answers. Works in small pieces, so that a thread that does it leaves the
interpreter to others. Must not know who owns a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from paceline.core.errors import PlatformError
from paceline.data.arrays import ArraySource

_PIECE_BYTES = 1 << 20


def checksum(source: Any, samples: range) -> str | None:
    """Of the samples with these numbers; None where the data has none."""
    if not isinstance(source, ArraySource):
        return None
    digest = xxhash.xxh3_64()
    for column in source.columns:
        rows = column[samples.start : samples.stop]
        if isinstance(rows, Tensor):
            if rows.layout is not torch.strided or rows.is_quantized:
                return None
            rows = rows.detach().cpu().resolve_conj().resolve_neg()
            if rows.dtype is torch.bfloat16:
                rows = rows.view(torch.int16)
            rows = rows.numpy()
        array = np.asarray(rows)
        if array.dtype.hasobject:
            return None
        digest.update(f"{array.dtype.str}{array.shape[1:]}".encode())
        each = max(1, array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64)))
        step = max(1, _PIECE_BYTES // each)
        for start in range(0, len(array), step):
            digest.update(np.ascontiguousarray(array[start : start + step]).view(np.uint8).reshape(-1).data)
    return digest.hexdigest()


def checksums(source: Any, parts: Sequence[range]) -> list[str | None]:
    return [checksum(source, part) for part in parts]


def verify(source: Any, index: int, samples: range, expected: str | None) -> bool:
    """Whether there was something to compare; PlatformError where the samples are not what they were."""
    if expected is None:
        return False
    found = checksum(source, samples)
    if found != expected:
        raise PlatformError(
            f"shard {index}, samples {samples.start} to {samples.stop - 1}, changed while it was trained on: "
            f"its checksum is {found} and was {expected}",
            remedy="do not write to the data during training; if nobody did, suspect the memory or the disk",
            shard=index,
        )
    return True
