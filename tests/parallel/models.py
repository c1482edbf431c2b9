"""Models, data and the arithmetic of one process, shared by the tests of this folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.reduction_order import Node, tree_fold
from paceline.frontends.spawn import spawn
from paceline.parallel.ddp import DistributedDataParallel

DDP: Any = DistributedDataParallel  # as untyped as most scripts
TINY_BUCKETS = 0.0001  # MiB: about one parameter per bucket


def ranks(fn: Callable[..., Any], *args: Any, workers: int = 2) -> list[Any]:
    """Results by rank, with one thread each: how threads share a sum changes its last bits."""
    return spawn(fn, *args, workers=workers, threads=1, timeout=60)


class Net(nn.Module):
    """Two layers, a buffer, and values over many orders of magnitude."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


def batch(rank: int, step: int = 0, size: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 5, generator=generator) * 10.0 ** torch.randint(
        -4, 4, (size, 1), generator=generator
    )


def loss(output: Tensor) -> Tensor:
    return (output**2).sum()


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def local_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    alone = copy.deepcopy(model)
    loss(alone(x)).backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def canonical_average(parts: list[Tensor]) -> Tensor:
    """The average over ranks along the tree, computed in this process."""
    count = len(parts)
    if count == 1:
        return parts[0]
    fold = tree_fold([Node(rank, 0) for rank in range(count)], count)
    flats = [part.reshape(-1) for part in parts]
    out = torch.empty_like(flats[0])
    fold.run(torch.add, flats, out, [torch.empty_like(out) for _ in range(fold.temporaries)])
    return out.div_(count).view(parts[0].shape)


def expected_average(model: nn.Module, workers: int) -> list[Tensor]:
    by_rank = [local_gradients(model, batch(rank)) for rank in range(workers)]
    return [canonical_average(list(parts)) for parts in zip(*by_rank, strict=True)]


def equal(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(5, 4)
        self.left = nn.Linear(4, 1)
        self.right = nn.Linear(4, 1)
        self.never = nn.Linear(4, 1)

    def forward(self, x: Tensor, *sides: str) -> Tensor:
        hidden = self.trunk(x)
        return torch.stack([getattr(self, side)(hidden) for side in sides])
