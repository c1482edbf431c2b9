"""Models of the kinds that people train, each as a small run; see test_same_bits.py."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tests.train.running import job, regression, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.train.loop.worker_jobs import TrainJob

SAMPLES = 29


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Any:
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(inner)))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), Residual(4), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )


class LanguageModel(nn.Module):
    """The head is the embedding: one tensor under two names."""

    def __init__(self, words: int = 11, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.block(self.embedding(tokens)))


class Noisy(Dataset):
    """Augments what it reads, with every generator that there is."""

    def __init__(self) -> None:
        self.x, self.y = regression(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(5) * random.random() + float(np.random.rand())
        return self.x[index] + 0.1 * noise, self.y[index]


class NoisyStream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        source = Noisy()
        yield from (source[index] for index in range(SAMPLES))


def next_word(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    (tokens,) = batch
    output = model(tokens[:, :-1])
    loss = F.cross_entropy(output.flatten(0, 1).float(), tokens[:, 1:].flatten())
    return loss, {"right": (output.argmax(-1) == tokens[:, 1:]).float().mean()}


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def mlp_with_dropout(**given: Any) -> TrainJob:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2), nn.Dropout(0.1))
    )
    return job(
        model, regression(SAMPLES), optimizer=lambda p: torch.optim.Adam(p, 0.01), epochs=3, seed=7, **given
    )


def small_resnet(change: Callable[[nn.Module], nn.Module] = lambda model: model, **given: Any) -> TrainJob:
    images = torch.randn(SAMPLES, 1, 6, 6, generator=_generator())
    labels = torch.randint(0, 3, (SAMPLES,), generator=_generator())
    return job(
        change(seeded(resnet)),
        (images, labels),
        objective=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
        epochs=3,
        **given,
    )


def transformer(**given: Any) -> TrainJob:
    tokens = torch.randint(0, 11, (SAMPLES, 7), generator=_generator())
    return job(
        seeded(LanguageModel),
        (tokens,),
        objective=next_word,
        optimizer=lambda p: torch.optim.AdamW(p, 0.01),
        epochs=3,
        precision="bf16",
        clip_norm=0.5,
        schedule="cosine",
        warmup_steps=2,
        **given,
    )


def augmented(**given: Any) -> TrainJob:
    return job(seeded(lambda: nn.Linear(5, 2)), Noisy(), epochs=2, **given)


def augmented_by_loader_workers(**given: Any) -> TrainJob:
    loader = DataLoader(Noisy(), batch_size=3, num_workers=2)
    return job(seeded(lambda: nn.Linear(5, 2)), loader, epochs=2, **given)


def stream(**given: Any) -> TrainJob:
    return job(seeded(lambda: nn.Linear(5, 2)), NoisyStream(), epochs=2, **given)


CATALOGUE: dict[str, Callable[[], TrainJob]] = {
    "mlp": mlp_with_dropout,
    "mlp, accumulating": lambda: mlp_with_dropout(micro_batch=1),
    "resnet": small_resnet,
    "resnet, sync batch-norm": lambda: small_resnet(nn.SyncBatchNorm.convert_sync_batchnorm),
    "resnet, accumulating": lambda: small_resnet(micro_batch=1),
    "transformer": transformer,
    "transformer, accumulating": lambda: transformer(micro_batch=1),
}
"""The models of figure 1."""

DATA: dict[str, Callable[[], TrainJob]] = {
    "augmented": augmented,
    "augmented by the loader's workers": augmented_by_loader_workers,
    "stream": stream,
}
"""Randomness in reading."""
