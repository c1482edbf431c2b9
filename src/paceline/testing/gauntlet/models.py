"""Small models, data and callbacks for the gauntlet: each has state that a failure could break."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional as F
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.data.orders import LengthBuckets, OrderedData, WeightedOrder
from paceline.frontends import collective_functions
from paceline.frontends.trainer import Trainer
from paceline.train.callbacks import Modifier
from paceline.train.settings.evaluation_config import EvaluationConfig
from paceline.train.state.model_state import state_hash
from paceline.train.step_info import StepInfo

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
class WithSyncedNorm(nn.Module):
    """Statistics over the global batch, in the middle of a pass that adds up several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.norm, self.deeper_norm = nn.SyncBatchNorm(16), nn.SyncBatchNorm(16, momentum=None)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Any:
        start = self.first(x)
        beside = torch.tanh(start)
        inner = F.dropout(F.relu(self.norm(start)), 0.2, self.training)
        deeper = self.deeper_norm(self.second(inner) + start)
        return self.head(deeper + beside * start + inner)


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


@final
class Gan(nn.Module):
    """Two networks whose optimizers take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
        self.maker = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.maker.append(nn.Linear(16, FEATURES))

    def forward(self, noise: Tensor) -> Any:
        return self.critic(self.maker(noise))


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


def two_held_out_sets() -> EvaluationConfig:
    """Return an evaluation with everything of its own: objective, sets, batch size, metrics of both kinds."""
    x, y = numbers()
    return EvaluationConfig(
        objective=smoothed,
        metrics={"macro_f1": macro_f1, "spread": Spread()},
        sets={"near": (x[40:75] + 0.1, y[40:75]), "far": (x[75:130] * 1.2, y[75:130])},
        batch_size=7,
    )


def macro_f1(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean F1 over the classes: no mean over batches gives it."""
    chosen, total = outputs.argmax(-1), 0.0
    for one in range(CLASSES):
        right = int(((chosen == one) & (targets == one)).sum())
        total += 2.0 * right / max(1, int((chosen == one).sum() + (targets == one).sum()))
    return total / CLASSES


@final
class Spread:
    """A metric object whose result depends on the order of its batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._value = torch.zeros(())

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self._value = 0.9 * self._value + outputs.gather(1, targets[:, None]).std()

    def compute(self) -> Tensor:
        return self._value


def weighted_numbers() -> OrderedData:
    return WeightedOrder([1.0 + number % 5 for number in range(SAMPLES)], samples=150).over(numbers())


def bucketed_numbers() -> OrderedData:
    return LengthBuckets([number * 37 % 60 for number in range(SAMPLES)], pool=4).over(numbers())


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


def smoothed(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return another loss than that of training, and another metric."""
    x, y = batch
    output = model(x).float()
    return F.cross_entropy(output, y, label_smoothing=0.1), {"margin": output.amax(-1).mean()}


def risky(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return an infinite loss for some samples, in training."""
    loss, metrics = classify(model, batch)
    spoiled = model.training and bool((batch[0][:, 0] > 2.0).any())
    # Not torch.where, whose gradient would be NaN for the other samples too: every step would be skipped.
    return loss * torch.inf if spoiled else loss, metrics


def annealed(model: nn.Module, batch: Any, step: StepInfo) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss that depends on the step, on the epoch and on the length of the run."""
    loss, metrics = classify(model, batch)
    done = step.step / (step.total_steps or 1)
    return loss * (1.0 - 0.5 * done + 0.1 * (step.epoch % 3)), metrics


def adversarial(model: Any, batch: Any, step: StepInfo) -> Tensor:
    """Return the loss of the network whose turn it is; in an evaluation, the critic's."""
    x, _ = batch
    if model.training:
        time.sleep(PASS_SECONDS)
    made = model(torch.randn_like(x))
    if step.optimizer == 1:
        return F.softplus(-made).mean()
    return F.softplus(made).mean() + F.softplus(-model.critic(x)).mean()


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


@final
class Agreeing(Modifier):
    """A modifier that exchanges its state with the other ranks, after it has changed it."""

    def __init__(self) -> None:
        self._seen = 0

    def change_gradients(self, parameters: Mapping[str, Parameter]) -> None:
        self._seen += 1
        heard = collective_functions.all_gather(self._seen)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 + max(heard) % 5 / 50.0)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = int(state["seen"])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=1e-3)


def cosine_and_plateau(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Return, of the first, warmup and a cosine; of the second, what follows the validation loss."""
    first, second = optimizers
    warm = lr_scheduler.LinearLR(first, 0.2, total_iters=2)
    cosine = lr_scheduler.SequentialLR(first, [warm, lr_scheduler.CosineAnnealingLR(first, 4)], [2])
    return [cosine, lr_scheduler.ReduceLROnPlateau(second, factor=0.5, patience=0, threshold=0.05)]


def one_cycle(optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    """Return a scheduler that changes Adam's betas as well."""
    return lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps)


def plateau(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Return what follows a metric that is to rise."""
    return lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", factor=0.5, patience=0, threshold=0.02)


def cosine_and_step(optimizers: Sequence[torch.optim.Optimizer]) -> list[LRScheduler]:
    """Return a scheduler for each of two optimizers that take turns."""
    first, second = optimizers
    return [lr_scheduler.CosineAnnealingLR(first, 5), lr_scheduler.StepLR(second, 2, gamma=0.6)]


def slower(step: int, total_steps: int) -> float:
    return 1.0 - 0.5 * step / total_steps


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


def critic_and_maker(parameters: Any) -> list[torch.optim.Optimizer]:
    named = dict(parameters.named)
    critic = [one for name, one in named.items() if name.startswith("critic")]
    maker = [one for name, one in named.items() if name.startswith("maker")]
    return [torch.optim.Adam(critic, 5e-3), torch.optim.SGD(maker, 0.02, momentum=0.9)]


def averaged(trainer: Trainer) -> str:
    return state_hash(trainer.averaged_model)


def two_optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
    first, *rest = list(parameters)
    return [torch.optim.SGD([first], 0.05, momentum=0.9), torch.optim.AdamW(rest, 1e-2)]
