"""A model of a given size, and a task that it can learn, where the user gives only sizes.

The task: a teacher, a small network with random weights, answers random inputs; noise is added. Everything
follows from the seed. Generated in parts of a few milliseconds, so that the thread that does it releases the
interpreter often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError
from paceline.core.wording import counted

_HIDDEN_TEACHER = 16
_NOISE = 0.1
_ROWS = 8192  # generated at once
_SEARCH = 24


@final
@dataclass(frozen=True)
class Shape:
    """Widths of a network with two hidden layers and one output."""

    inputs: int
    first: int
    second: int

    @property
    def parameters(self) -> int:
        return (self.inputs + 1) * self.first + (self.first + 1) * self.second + self.second + 1


def shape_for(size: int) -> Shape:
    """Return the shape whose number of parameters is nearest to `size`, of those about as wide as deep."""
    inputs = 4 if size < 500 else 8 if size < 5_000 else 32 if size < 500_000 else 64
    side = max(1, int((((inputs + 3) ** 2 + 4 * size) ** 0.5 - (inputs + 3)) / 2))
    best = Shape(inputs, 1, 1)
    for first in range(max(1, side - _SEARCH), side + _SEARCH + 1):
        rest = size - 1 - (inputs + 1) * first
        second = max(1, round(rest / (first + 2)))
        candidate = Shape(inputs, first, second)
        if abs(candidate.parameters - size) < abs(best.parameters - size):
            best = candidate
    return best


def make_model(shape: Shape) -> nn.Module:
    """Build the network; called in every worker, with the generators seeded by the run."""
    return nn.Sequential(
        nn.Linear(shape.inputs, shape.first),
        nn.ReLU(),
        nn.Linear(shape.first, shape.second),
        nn.ReLU(),
        nn.Linear(shape.second, 1),
    )


def make_task(inputs: int, samples: int, seed: int, noise: float = _NOISE) -> tuple[Tensor, Tensor]:
    """Return inputs, and what the teacher says about them: mean about 0, variance about 1, and noise."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randn(inputs, _HIDDEN_TEACHER, generator=generator) * (2.0 / inputs) ** 0.5
    outer = torch.randn(_HIDDEN_TEACHER, 1, generator=generator) * (2.0 / _HIDDEN_TEACHER) ** 0.5
    try:
        x, y = torch.empty(samples, inputs), torch.empty(samples, 1)
    except RuntimeError as error:
        raise ConfigError(
            f"there is no memory for {counted(samples, 'sample')} of {counted(inputs, 'number')}",
            remedy="set a smaller total_samples, or give a dataset=",
            key="total_samples",
        ) from error
    for start in range(0, samples, _ROWS):
        rows = slice(start, start + _ROWS)
        x[rows].normal_(generator=generator)
        y[rows] = torch.tanh(x[rows] @ inner) @ outer
        y[rows] += noise * torch.randn(len(y[rows]), 1, generator=generator)
    return x, y
