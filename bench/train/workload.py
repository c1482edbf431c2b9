"""The work that every contender of the speed benchmarks does: model, data, optimizer and batch per worker.

Contenders get a workload by its name, since each runs in processes of its own. Data is random and in memory:
what is measured is the step, not a disk.

Batches are the usual ones of such models and were not searched for: 64 a worker for the MLPs (as in most
MNIST examples), 32 for the conv net (as in torch's CIFAR tutorials' range of 4 to 128). The optimizer is SGD
with momentum in its fused form, the fastest that torch has on a CPU, for all contenders (fused AdamW where
state is to be saved).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.train import models

SEED = 11


@dataclass(frozen=True)
class Workload:
    """One model to train. `batch` is per worker."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    batch: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

    def model(self) -> nn.Module:
        """The same initial weights in every process that asks."""
        torch.manual_seed(SEED)
        return self.build()

    def data(self, workers: int) -> tuple[Tensor, Tensor]:
        """Images and labels for 40 steps an epoch: epochs end within a measurement, as they do in life."""
        generator = torch.Generator().manual_seed(SEED)
        samples = 40 * self.batch * workers
        images = torch.randn(samples, *self.shape, generator=generator)
        labels = torch.randint(self.classes, (samples,), generator=generator)
        return images, labels


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


SPEED = (
    Workload("mlp_1m", "MLP, 1 M", models.mlp_1m, (784,), 10, 64, momentum),
    Workload("conv", "conv net", models.conv_net, (3, 32, 32), 10, 32, momentum),
    Workload("mlp_25m", "MLP, 25 M", models.mlp_25m, (1024,), 10, 64, momentum),
)
STATE = Workload("mlp_33m", "MLP, 400 MB of state with AdamW", models.mlp_33m, (1024,), 10, 64, adamw)
WORKLOADS = {work.name: work for work in (*SPEED, STATE)}
