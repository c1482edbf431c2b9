"""Randomness that belongs to the work and not to the worker: generators seeded from a key of numbers.

A key such as (seed, epoch, step, shard) names a piece of work; whoever does it draws the same numbers. Must
not know what the numbers of a key mean.
"""

from __future__ import annotations

import random

import numpy as np
import torch

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def derive(*key: int) -> int:
    """64 bits that depend on every number of the key and on their order; the same on every platform."""
    state = _GOLDEN
    for number in key:
        # The finaliser of splitmix64: neighbouring keys, the usual case, share no pattern.
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state = (state ^ state >> 31) + _GOLDEN & _MASK
    return state


def seed_everything(*key: int) -> None:
    """Seeds Python's, NumPy's and torch's generators (those of every GPU in use too) from a key."""
    seed = derive(*key)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if in_use:
        torch.cuda.manual_seed_all(seed)
