"""Messages of every kind that travels, and how they are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

NESTED = {
    "step": 3,
    "loss": [0.5, None],
    ("a", 1): {"text": "ü", "raw": b"\0\1", "big": 1 << 90},
    "set": {1, 2},
}


def same(left: Any, right: Any) -> bool:
    """Equal values of equal kinds, tensors and arrays included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


MESSAGES: list[Any] = [
    torch.arange(6.0).reshape(2, 3).t(),
    torch.tensor(5, dtype=torch.int16),
    torch.empty(0, 4),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]).conj(),
    np.arange(6, dtype="i2").reshape(3, 2),
    np.array(2.5),
    np.empty((0, 3)),
    np.arange(4, dtype=">f8"),
    NESTED,
    None,
    "",
    [],
    [torch.ones(2), {"deep": np.arange(3)}, (torch.zeros(0, dtype=torch.uint8),)],
]
