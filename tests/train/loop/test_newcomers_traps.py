"""Mistakes that trained nothing, or never saved, without a word: refused in the first step, or they work."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.one_thread import one_thread as one_thread
from tests.train import small_run
from tests.train.running import job, mlp, regression, train
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.core.errors import UsageError
from paceline.train.callbacks import Callbacks, Modifier
from paceline.train.settings.train_config import CheckpointConfig, EarlyStopping
from paceline.train.state import modifier_states

DATA = regression(24)
OTHER = mlp()


def of_another_model(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(OTHER(batch[0]), batch[1])


@pytest.mark.parametrize(("workers", "shards"), [(1, 1), (1, 4), (2, 2)])
def test_an_objective_that_uses_another_model_is_refused_in_the_first_step(workers: int, shards: int) -> None:
    given = job(mlp(), DATA, objective=of_another_model, shards=shards)
    with pytest.raises(UsageError, match="step 1 gave no gradient to any parameter of the model"):
        train(given, workers)


def test_also_in_the_first_step_after_a_resume(tmp_path: Path) -> None:
    train(job(mlp(), DATA, max_steps=2, run_dir=tmp_path / "run"))
    again = job(mlp(), DATA, objective=of_another_model, max_steps=4, run_dir=tmp_path / "run", resume="auto")
    with pytest.raises(UsageError, match="step 3 gave no gradient to any parameter of the model"):
        train(again)


def test_some_parameters_without_a_gradient_are_allowed() -> None:
    """A first step that only one layer takes part in is the user's business, and named in the log."""
    model = mlp()

    def objective(given: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(given.get_submodule("0")(batch[0])[:, :2], batch[1])

    assert train(job(model, DATA, objective=objective, max_steps=2)).history.steps


@pytest.mark.parametrize("name", ["loss", "train_loss"])
@pytest.mark.parametrize("watched", [False, True])
def test_a_metric_with_the_name_of_the_loss_is_refused(tmp_path: Path, name: str, watched: bool) -> None:
    """It would have replaced what keep_best and early stopping watch."""

    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        loss = F.mse_loss(model(batch[0]), batch[1])
        return loss, {name: -loss.detach()}

    given = job(
        mlp(),
        DATA,
        objective=objective,
        validation=DATA,
        run_dir=tmp_path / "run",
        epochs=2,
        checkpoint=CheckpointConfig(keep_best=1),
        early_stopping=EarlyStopping(patience=1) if watched else None,
    )
    with pytest.raises(UsageError, match=f"the metric '{name}' has the name of the loss itself"):
        train(given)


class Momentum(Modifier):
    """Keeps tensors, an array and nested ones of both: what an average of gradients needs."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}
        self.seen = np.zeros(3, dtype=np.int16)
        self.nested: list[Any] = [torch.zeros(0), (torch.tensor(True), "text", 1.5)]

    def change_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.seen[1] += 1
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            mean = self.mean.setdefault(name, torch.zeros_like(parameter.grad, dtype=torch.complex128))
            mean.mul_(0.9).add_(parameter.grad)
            parameter.grad.copy_(mean.real)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen, "nested": self.nested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.seen, self.nested = state["mean"], state["seen"], state["nested"]
        assert self.seen.dtype == np.int16
        assert self.seen.flags.writeable
        assert self.nested[0].shape == (0,)
        assert self.nested[1][0].dtype == torch.bool
        assert self.nested[1][1:] == ("text", 1.5)


def test_a_modifiers_tensors_are_saved_and_come_back(tmp_path: Path) -> None:
    whole = train(job(mlp(), DATA, epochs=3, shards=2), 1, lambda: [Momentum()])
    first = job(mlp(), DATA, max_steps=3, shards=2, run_dir=tmp_path / "run")
    train(first, 2, lambda: [Momentum()])
    assert list((tmp_path / "run" / "checkpoints").glob("v*"))
    second = job(mlp(), DATA, epochs=3, shards=2, run_dir=tmp_path / "run", resume="auto")
    assert train(second, 1, lambda: [Momentum()]).hash == whole.hash
    assert whole.hash != train(job(mlp(), DATA, epochs=3, shards=2)).hash


class Odd(Modifier):
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}


@pytest.mark.parametrize("value", [object(), np.array([object()])])
def test_a_modifiers_state_that_no_checkpoint_can_hold_is_refused_in_the_first_step(
    tmp_path: Path, value: Any
) -> None:
    given = job(mlp(), DATA, epochs=9, run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match=r"0:Odd.*value"):
        train(given, 1, lambda: [Odd(value)])
    assert not list((tmp_path / "run" / "checkpoints").glob("v*"))


def test_states_are_told_apart_by_every_element_of_a_tensor() -> None:
    """Text would show a thousand of them at most."""
    large = torch.zeros(10_000)
    before = modifier_states.digests(Callbacks([Odd(large.clone())]))
    large[5_000] = 1.0
    assert modifier_states.digests(Callbacks([Odd(large)])) != before


class Recurrent(nn.Module):
    """What a module keeps in itself: a hidden state, a pair of them, a counter; or only caches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(5, 2)
        self.hidden: Any = None
        self.mask: Tensor | None = None
        self.calls = 0
        self.longest = 0
        self.window: deque[float] = deque(maxlen=3)
        self.means: list[float] = []
        self.average = SimpleNamespace(value=0.0)
        self.draws = torch.Generator().manual_seed(1)
        self.numpy_draws = np.random.default_rng(1)
        self.sizes = {"batch": 0}
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if self.kind == "hidden":
            state = torch.zeros(2) if self.hidden is None else self.hidden
            self.hidden = (0.5 * state + out.mean(0)).detach()
            return out + state
        if self.kind == "pair":
            self.hidden = (out.detach().mean(0), [out.detach().mean(0)])
        if self.kind == "counter":
            self.calls += 1
            return out / self.calls
        if self.kind == "window":
            self.window.append(x.mean().item())
            return out + sum(self.window)
        if self.kind == "means":
            self.means.append(x.mean().item())
            return out + self.means[0]
        if self.kind == "average.value":
            self.average.value = 0.5 * self.average.value + x.mean().item()
            return out + float(self.average.value)
        if self.kind == "draws":
            return out + torch.randn(2, generator=self.draws)
        if self.kind == "numpy_draws":
            return out + float(self.numpy_draws.standard_normal())
        if self.kind == "cache":
            self.sizes["batch"] = x.shape[0]
            # A function of the batch's shape, made again where that changes; and an activation for later.
            if self.mask is None or self.mask.shape[0] != x.shape[0]:
                self.mask = torch.ones(x.shape[0], x.shape[0]).triu()
            self.longest = max(self.longest, x.shape[0])
            self.hidden = out
            with torch.no_grad():
                self.seen += 1
            return self.mask @ out
        return out


@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("hidden", "hidden"), ("pair", "hidden"), ("counter", "calls")]
    + [(name, name) for name in ("window", "means", "average.value", "draws", "numpy_draws")],
)
def test_state_that_a_module_carries_in_an_attribute_is_named(
    caplog: pytest.LogCaptureFixture, kind: str, name: str, micro_batch: int | None
) -> None:
    model = nn.Sequential(Recurrent(kind))
    train(job(model, DATA, shards=2, epochs=2, micro_batch=micro_batch))
    told = [record.getMessage() for record in caplog.records if "neither a parameter" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"0.{name} of the model Sequential changes with every batch")


@pytest.mark.parametrize("kind", ["cache", "none"])
def test_caches_are_spared(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    train(job(nn.Sequential(Recurrent(kind)), regression(29), shards=3, epochs=2, micro_batch=2))
    assert "neither a parameter" not in caplog.text


def test_final_loss_is_of_the_whole_epoch_also_after_a_resume_in_its_middle(tmp_path: Path) -> None:
    whole = train(job(mlp(), DATA, global_batch=6, shards=2, epochs=2)).history
    given: dict[str, Any] = {"global_batch": 6, "shards": 2, "run_dir": tmp_path / "run"}
    train(job(mlp(), DATA, max_steps=6, **given))
    resumed = train(job(mlp(), DATA, epochs=2, resume="auto", **given)).history
    assert resumed.final_loss == pytest.approx(whole.final_loss, rel=1e-12)
    assert resumed.final_loss == resumed.epochs[-1].loss == resumed.from_dict(resumed.to_dict()).final_loss


def test_final_loss_is_the_training_loss_with_validation_data_too() -> None:
    ended = train(job(mlp(), DATA, epochs=1, validation=regression(12, seed=9))).history
    assert ended.final_loss == ended.epochs[-1].loss != ended.evaluations[-1].loss


class Boundless(torch.optim.SGD):
    """Keeps something that is neither a tensor nor plain data."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["history"] = object()
        return super().step(closure)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_optimizers_state_that_no_checkpoint_can_hold_is_refused_by_name(
    tmp_path: Path, workers: int
) -> None:
    """With a supervisor, whose members compare their states before they save on failure."""
    config = small_run.settings(tmp_path / "run", workers)
    trainer = paceline.Trainer(
        lambda: nn.Linear(6, 3),
        nn.CrossEntropyLoss(),
        optimizer=lambda p: Boundless(list(p), 0.1),
        config=config,
    )
    samples = small_run.data()
    with pytest.raises(UsageError, match="Boundless, history of weight is an object"):
        trainer.fit(samples)
