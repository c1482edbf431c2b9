"""The training that is disturbed: model, optimizer, data and the order of samples. One for every contender.

An MLP of 1 M parameters over images of 28 x 28, 80 samples a worker, SGD with momentum: steps of about 20 ms
with 4 workers on 2 cores. Everything is a function of the step's number, so that a run which goes back to an
earlier step sees the same samples again. Must not know who trains.

PACELINE_BENCH_DEVICE_MS: for so long every pass waits, as for an accelerator, and leaves the cores to others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.train import models

SEED = 23
WORKERS = 4
BATCH = 80
GLOBAL_BATCH = WORKERS * BATCH
CHECKPOINT_EVERY = 20
STEPS_AN_EPOCH = 40
SAMPLES = STEPS_AN_EPOCH * GLOBAL_BATCH
DEVICE_MS: Final = "PACELINE_BENCH_DEVICE_MS"


def build_model() -> nn.Module:
    """The same initial weights in every process that asks."""
    torch.manual_seed(SEED)
    model = models.mlp_1m()
    if DEVICE_MS in os.environ:
        model.register_forward_pre_hook(_wait_as_for_a_device)
    return model


def _wait_as_for_a_device(module: nn.Module, inputs: object) -> None:
    time.sleep(float(os.environ[DEVICE_MS]) / 1000)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def build_data() -> tuple[Tensor, Tensor]:
    """Images and labels, in memory: what is measured is not a disk."""
    generator = torch.Generator().manual_seed(SEED)
    images = torch.randn(SAMPLES, 784, generator=generator)
    return images, torch.randint(10, (SAMPLES,), generator=generator)


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


@final
class Batches:
    """Part `part` of `parts` of the samples of any step, counted from 0; shuffled anew each epoch."""

    def __init__(self) -> None:
        self._images, self._labels = build_data()
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def take(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        epoch, step_of_epoch = divmod(step, STEPS_AN_EPOCH)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(SEED + epoch)
            self._order, self._epoch = torch.randperm(SAMPLES, generator=generator), epoch
        first = step_of_epoch * GLOBAL_BATCH
        ids = self._order[first + GLOBAL_BATCH * part // parts : first + GLOBAL_BATCH * (part + 1) // parts]
        return self._images.index_select(0, ids), self._labels.index_select(0, ids)
