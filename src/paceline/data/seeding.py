"""Randomness that belongs to the work and not to the worker: generators seeded from a key of numbers.

A key such as (seed, epoch, step, shard) names a piece of work; every process that does it draws the same
numbers. Reading sets the generators of other code aside meanwhile, and uses one thread.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.random import mtrand
from torch import Tensor

_MASK = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15


def derive(*key: int) -> int:
    """Hash a key to 64 bits that depend on each number and their order; the same on every platform."""
    state = _GOLDEN
    for number in key:
        # The finaliser of splitmix64: neighbouring keys, the usual case, share no pattern.
        state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state = (state ^ state >> 31) + _GOLDEN & _MASK
    return state


def seed_everything(*key: int) -> None:
    """Seed Python's, NumPy's and torch's generators (those of every GPU in use too) from a key."""
    seed = derive(*key)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed_all(seed)


@final
@dataclass
class Generators:
    """One state of Python's, NumPy's and torch's generators, set aside until it is entered again."""

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: list[Tensor]

    @staticmethod
    def current() -> Generators:
        """Return the states of now. NumPy's generator is kept itself: put another in its place."""
        return Generators(
            python=random.getstate(),
            numpy=mtrand.get_bit_generator(),
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
        )

    def enter(self) -> None:
        random.setstate(self.python)
        mtrand.set_bit_generator(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data, without a GPU's generators: no reader draws from them."""
        version, numbers, gauss = self.python
        return {
            "python": [version, np.array(numbers, np.uint32), gauss],
            "numpy": self.numpy.state,
            "torch": self.cpu.numpy(),
        }

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> Generators:
        version, numbers, gauss = plain["python"]
        twister = np.random.MT19937(0)
        twister.state = plain["numpy"]
        return Generators(
            python=(version, tuple(numbers.tolist()), gauss),
            numpy=twister,
            cpu=torch.from_numpy(plain["torch"]),
            cuda=[],
        )


def _cuda_in_use() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-untyped-call, no-any-return]


@contextmanager
def set_aside(numpy: np.random.MT19937 | None = None) -> Iterator[None]:
    """Leave the generators of the caller as they were, whatever is drawn or seeded inside.

    NumPy's is replaced by `numpy` or a new one, out of reach of code that draws from the global one.
    Exchanging generators costs half a microsecond; copying the state of one out and in costs seventy.
    """
    outside = Generators.current()
    mtrand.set_bit_generator(numpy or np.random.MT19937(0))
    try:
        yield
    finally:
        outside.enter()


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread of torch, as in a loader's workers: how threads share a sum changes its last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
