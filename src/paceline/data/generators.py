"""Conditions of reading: random generators kept apart from everybody else's, and one thread.

Must not know what the numbers are for; seeds come from `randomness`.
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
        """The states of now, to come back to. NumPy's generator is kept itself: put another in its place."""
        return Generators(
            python=random.getstate(),
            numpy=mtrand.get_bit_generator(),
            cpu=torch.get_rng_state(),
            cuda=_cuda_states(),
        )

    def enter(self) -> None:
        random.setstate(self.python)
        mtrand.set_bit_generator(self.numpy)
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)

    def to_plain(self) -> dict[str, Any]:
        """As data that core.wire can carry. A GPU's generators stay behind: no reader draws from them."""
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


def _cuda_states() -> list[Tensor]:
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.get_rng_state_all() if in_use else []


def new_numpy() -> np.random.MT19937:
    """A generator to put in the place of NumPy's own, which is then out of reach of whoever draws.

    Exchanging generators costs half a microsecond; copying the state of one out and in costs seventy.
    """
    return np.random.MT19937(0)


@contextmanager
def set_aside(numpy: np.random.MT19937) -> Iterator[None]:
    """What is drawn or seeded inside leaves the generators of the caller as they were; NumPy's is `numpy`."""
    outside = Generators.current()
    mtrand.set_bit_generator(numpy)
    try:
        yield
    finally:
        outside.enter()


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch inside, as in a loader's workers: how threads share a sum changes its last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
