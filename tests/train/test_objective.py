"""What a loss may be: it learns nothing, remembers nothing, is a mean, and gives single numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.running import hashes, job, mlp, regression, train
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.train.loop import worker_jobs
from paceline.train.objective import Objective

DATA = regression(29)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.temperature, target)


def test_a_loss_that_would_learn_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="temperature of the loss Learned would never be trained") as caught:
        Objective(Learned())
    assert "make them part of the model" in caught.value.remedy
    with pytest.raises(UsageError, match="temperature"):
        Objective(partial(Learned()))
    assert train(job(mlp(), DATA, objective=Learned().requires_grad_(False), epochs=1)).history.steps


class Remembering(nn.Module):
    average: Tensor

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("constant", torch.tensor([1.0, float("nan")]))
        self.calls, self.late = 0, late

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(output, target)
        self.calls += 1
        if not self.late or self.calls > 3:
            self.average = 0.5 * self.average + 0.5 * loss.detach()
        return loss * (1 + self.average)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loss_that_remembers_is_refused(late: bool, workers: int) -> None:
    with pytest.raises(UsageError, match="average of the loss Remembering changed while it was used"):
        train(job(mlp(), DATA, objective=Remembering(late), epochs=1), workers)


def test_a_loss_that_remembers_is_refused_in_evaluation_too() -> None:
    given = job(mlp(), DATA, objective=Remembering(False))
    with DistributedContext(1, 0) as context, pytest.raises(UsageError, match="average of the loss"):
        worker_jobs.evaluate(context, given)


def test_constants_of_a_loss_are_welcome() -> None:
    classes = (DATA[0], (DATA[1][:, 0] > 0).long())
    given = job(mlp(), classes, objective=nn.CrossEntropyLoss(weight=torch.tensor([0.3, 0.7])), epochs=1)
    assert len(set(hashes(given, (1, 3)))) == 1


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(reduction="sum"),
        partial(F.mse_loss, reduction="sum"),
        partial(partial(F.cross_entropy, reduction="sum"), label_smoothing=0.1),
        partial(F.cross_entropy, reduction="none"),
        partial(F.mse_loss, size_average=False),
    ],
)
def test_sums_are_refused_however_they_are_asked_for(loss: Any) -> None:
    with pytest.raises(UsageError, match=r'\(reduction="(sum|none)"\): a step weights the mean losses'):
        Objective(loss)


def test_means_are_welcome_however_they_are_asked_for() -> None:
    Objective(partial(partial(F.cross_entropy, reduction="sum"), reduction="mean"))
    Objective(nn.KLDivLoss(reduction="batchmean"))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(3), r"the metric 'm' has shape \(3,\)"),
        (np.zeros((2, 2)), r"the metric 'm' has shape \(2, 2\)"),
        ("high", "the metric 'm' is a str"),
        (None, "the metric 'm' is a NoneType"),
    ],
)
def test_metrics_are_single_numbers(value: Any, said: str) -> None:
    def objective(model: nn.Module, batch: Any) -> Any:
        return F.mse_loss(model(batch[0]), batch[1]), {"m": value}

    given = job(mlp(), DATA, objective=objective, epochs=1)
    with pytest.raises(UsageError, match=said):
        train(given)
    with DistributedContext(1, 0) as context, pytest.raises(UsageError, match=said):
        worker_jobs.evaluate(context, given)


def test_numbers_of_every_kind_are_metrics() -> None:
    def objective(model: nn.Module, batch: Any) -> Any:
        loss = F.mse_loss(model(batch[0]), batch[1])
        kinds: dict[str, Any] = {"a": 2, "b": True, "c": np.float32(2.5), "d": torch.ones(1), "e": loss}
        return loss.reshape(1), kinds

    for workers in (1, 2):
        steps = train(job(mlp(), DATA, objective=objective, epochs=1), workers).history.steps
        assert steps[0].metrics == pytest.approx({"a": 2, "b": 1, "c": 2.5, "d": 1, "e": steps[0].loss})


def test_a_loss_without_gradient() -> None:
    def objective(model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).detach().mean()

    with pytest.raises(UsageError, match="the loss does not depend on any parameter that is trained"):
        train(job(mlp(), DATA, objective=objective, epochs=1))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("first_shard", [False, True])
def test_metrics_that_come_late_are_refused(workers: int, first_shard: bool) -> None:
    rows = DATA[0][:2] if first_shard else DATA[0][:12]

    def objective(model: nn.Module, batch: Any) -> Any:
        loss = F.mse_loss(model(batch[0]), batch[1])
        early = bool((batch[0][:1] == rows).all(1).any())
        return loss if early else (loss, {"m": 1.0})

    with pytest.raises(
        UsageError, match=r"different metrics on different|returned metrics \['m'\], and earlier none"
    ):
        train(job(mlp(), DATA, objective=objective, shuffle=False, epochs=1), workers)
