"""Small models, data and callbacks for the gauntlet: each has state that a failure could break."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.train.callbacks import Modifier

SAMPLES = 203  # an uneven end of each epoch
FEATURES, CLASSES, WORDS, LENGTH = 6, 3, 23, 5
# What a pass over a micro-batch takes at least: steps of some milliseconds, in which failures find room
# without keeping a core busy.
PASS_SECONDS = 0.002


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


@final
class TwoDtypes(nn.Module):
    """Parameters of two dtypes: a step exchanges two sums."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, CLASSES).double()

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)).double()).float()


@final
class WordBag(nn.Module):
    """A sparse embedding between dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(WORDS, 8, mode="mean", sparse=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, words: Tensor) -> Any:
        return self.head(self.embedding(words))


def sparse_only() -> nn.Module:
    """Return a model without any dense parameter."""
    return nn.EmbeddingBag(WORDS, CLASSES, mode="mean", sparse=True)


def numbers() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)


def words() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(12)
    text = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
    return text, text.sum(1) % CLASSES


def held_out() -> tuple[Tensor, Tensor]:
    x, y = numbers()
    return x[:40] + 0.1, y[:40]


def held_out_words() -> tuple[Tensor, Tensor]:
    text, target = words()
    return text[:40].flip(1), target[:40]


@final
class Items(Dataset[tuple[Tensor, Tensor]]):
    """A map-style dataset that draws random numbers while it reads."""

    def __init__(self) -> None:
        self.x, self.y = numbers()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(FEATURES), self.y[index]


@final
class NumberStream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        items = Items()
        yield from (items[index] for index in range(len(items)))


def loader() -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(Items(), batch_size=4, num_workers=1)


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return cross entropy and accuracy; in training, in no less than `PASS_SECONDS`."""
    x, y = batch
    if model.training:
        time.sleep(PASS_SECONDS)
    output = model(x).float()
    return F.cross_entropy(output, y), {"right": (output.argmax(-1) == y).float().mean()}


@final
class Momentum(Modifier):
    """A modifier whose state every later step depends on."""

    def __init__(self) -> None:
        self._seen = 0

    def change_gradients(self, parameters: Mapping[str, Parameter]) -> None:
        self._seen += 1
        for parameter in parameters.values():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad.mul_(1.0 + (self._seen % 7) / 100.0)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = int(state["seen"])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-3)


def dense_and_sparse(parameters: Any) -> list[torch.optim.Optimizer]:
    named = dict(parameters.named)
    return [
        torch.optim.SparseAdam([named["embedding.weight"]], 1e-2),
        torch.optim.Adam([named["head.weight"], named["head.bias"]], 1e-2),
    ]


def sparse_momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum, which is a sparse tensor for a sparse embedding."""
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def sparse_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(parameters), 1e-2)


def two_optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
    first, *rest = list(parameters)
    return [torch.optim.SGD([first], 0.05, momentum=0.9), torch.optim.AdamW(rest, 1e-2)]
