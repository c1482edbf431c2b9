"""A small network trained through every compressor ends as without one, thanks to error feedback."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from paceline.comm.compression import (
    Compression,
    PowerSGD,
    cast_gradients,
    quantize_gradients,
    sparsify_gradients,
)
from paceline.comm.compression.codecs import TopK

WORKERS = 4
CLASSES = 4
STEPS = 300
BATCH = 64
SHAPES = [(10, 64), (64,), (64, CLASSES), (CLASSES,)]

Reducer = Callable[[list[list[Tensor]]], list[Tensor]]


@cache
def task() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Each class is four clouds at random places in ten dimensions: no plane separates two classes."""
    generator = torch.Generator().manual_seed(5)
    centres = torch.randn(4 * CLASSES, 10, generator=generator) * 1.5
    cloud = torch.randint(4 * CLASSES, (8000,), generator=generator)
    points = centres[cloud] + torch.randn(8000, 10, generator=generator)
    labels = cloud % CLASSES
    return points[:4000], labels[:4000], points[4000:], labels[4000:]


def logits(points: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return torch.relu(points @ weights[0] + weights[1]) @ weights[2] + weights[3]


def train(reduce: Reducer) -> float:
    """Momentum SGD on four workers whose gradients meet in `reduce` alone; returns the test accuracy."""
    points, labels, test_points, test_labels = task()
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=generator) / shape[0] ** 0.5 for shape in SHAPES]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for _ in range(STEPS):
        batch = torch.randint(len(points), (WORKERS, BATCH), generator=generator)
        gradients = []
        for rows in batch:
            loss = torch.nn.functional.cross_entropy(logits(points[rows], weights), labels[rows])
            gradients.append(list(torch.autograd.grad(loss, weights)))
        for weight, gradient in zip(weights, reduce(gradients), strict=True):
            weight.grad = gradient
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return float((logits(test_points, weights).argmax(1) == test_labels).float().mean())


def plain(gradients: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*gradients, strict=True)]


def direct(make: Callable[[], Compression]) -> Reducer:
    """The direct algorithm: worker i owns slice i, receives it from the others and sends the sum, encoded."""
    compressions = [make() for _ in range(WORKERS)]

    def reduce(gradients: list[list[Tensor]]) -> list[Tensor]:
        flats = [torch.cat([g.reshape(-1) for g in each]) for each in gradients]
        transfers = [c.open(flat, "grads") for c, flat in zip(compressions, flats, strict=True)]
        numel = flats[0].numel()
        bounds = [numel * i // WORKERS for i in range(WORKERS + 1)]
        total = torch.empty(numel)
        for owner, (start, stop) in enumerate(itertools.pairwise(bounds)):
            received = torch.empty(stop - start)
            for sender, transfer in enumerate(transfers):
                if sender != owner:
                    transfers[owner].decode(transfer.encode(start, stop), received)
                    flats[owner][start:stop] += received
            transfers[owner].decode(transfers[owner].encode(start, stop), total[start:stop])
        for transfer in transfers:
            transfer.close()
        parts = torch.split(total / WORKERS, [g.numel() for g in gradients[0]])
        return [part.view(g.shape) for part, g in zip(parts, gradients[0], strict=True)]

    return reduce


def power_sgd(rank: int) -> Reducer:
    """Four PowerSGD instances in lockstep: an `average` call is answered with the mean of all four."""
    instances = [PowerSGD(rank, min_compression=1.0) for _ in range(WORKERS)]

    def reduce(gradients: list[list[Tensor]]) -> list[Tensor]:
        means: list[Tensor] = []
        # Each round of calls is collected with the means known so far, until all calls have been answered.
        while True:
            pending: list[Tensor] = []
            results = [
                attempt(instance, own, means, pending)
                for instance, own in zip(instances, gradients, strict=True)
            ]
            if not pending:
                return results[0]
            means.append(torch.stack(pending).mean(0))

    return reduce


class _UnansweredError(Exception):
    """Ends an attempt at the first `average` call whose answer is not known yet."""


def attempt(
    instance: PowerSGD, gradients: list[Tensor], means: list[Tensor], pending: list[Tensor]
) -> list[Tensor]:
    answers = iter(means)

    def average(flat: Tensor) -> Tensor:
        answer = next(answers, None)
        if answer is None:
            pending.append(flat)
            raise _UnansweredError
        return answer

    try:
        return instance.reduce(gradients, average)
    except _UnansweredError:
        return []


@cache
def uncompressed() -> float:
    return train(plain)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: direct(lambda: cast_gradients("fp16")), id="fp16"),
        pytest.param(lambda: direct(lambda: cast_gradients("bf16")), id="bf16"),
        pytest.param(lambda: direct(lambda: quantize_gradients(8)), id="int8"),
        pytest.param(lambda: direct(lambda: quantize_gradients(4)), id="int4"),
        pytest.param(lambda: direct(lambda: sparsify_gradients(0.99)), id="topk0.99"),
        pytest.param(lambda: power_sgd(2), id="powersgd2"),
    ],
)
def test_training_with_compression_reaches_the_uncompressed_accuracy(make: Callable[[], Reducer]) -> None:
    assert uncompressed() > 0.95
    assert train(make()) >= uncompressed() - 0.01


def test_without_error_feedback_top_k_does_not_get_there() -> None:
    without = train(direct(lambda: Compression(TopK(0.99), error_feedback=False)))
    assert without < uncompressed() - 0.02
