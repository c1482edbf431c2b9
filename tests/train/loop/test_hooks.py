"""Observers and modifiers in a real run: called in the documented order, on the documented ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import job, mlp, regression, train
from torch import nn

from paceline.core.errors import UsageError
from paceline.train.callbacks import Modifier, Observer
from paceline.train.settings.train_config import CheckpointConfig, EarlyStopping

DATA = regression(12)


class Watcher(Observer):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def on_start(self, run: Any) -> None:
        self.log.append(f"start {run.total_steps} steps")

    def on_step(self, record: Any) -> None:
        self.log.append(f"step {record.step}")

    def on_evaluation(self, evaluation: Any) -> None:
        self.log.append(f"evaluation {evaluation.step}")

    def on_epoch(self, record: Any) -> None:
        self.log.append(f"epoch {record.epoch}")

    def on_checkpoint(self, saved: Any) -> None:
        self.log.append(f"checkpoint {saved.step}")

    def on_end(self, history: Any) -> None:
        self.log.append(f"end {history.stopped}")


class Meddler(Modifier):
    def __init__(self, log: list[str], stop_after: int | None = None) -> None:
        self.log, self.stop_after = log, stop_after

    def change_batch(self, batch: Any) -> Any:
        self.log.append("batch")
        return batch

    def change_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        assert all(parameter.grad is not None for parameter in parameters.values())
        self.log.append("gradients")

    def stop(self, record: Any) -> str | None:
        self.log.append(f"stop? {record.step}")
        return "enough" if record.step == self.stop_after else None


def test_the_documented_order() -> None:
    log: list[str] = []
    given = job(
        mlp(),
        DATA,
        validation=DATA,
        callbacks=[Watcher(log), Meddler(log)],
        epochs=2,
        global_batch=6,
        shards=2,
    )
    train(given)
    step = ["batch", "batch", "gradients"]
    assert log == [
        "start 4 steps",
        *step, "step 1", "stop? 1",
        *step, "step 2", "stop? 2",
        "evaluation 2", "epoch 0",
        *step, "step 3", "stop? 3",
        *step, "step 4", "stop? 4",
        "evaluation 4", "epoch 1",
        "end None",
    ]  # fmt: skip


def test_evaluations_between_steps_and_checkpoints(tmp_path: Path) -> None:
    log: list[str] = []
    given = job(
        mlp(),
        DATA,
        validation=DATA,
        callbacks=[Watcher(log)],
        epochs=1,
        global_batch=4,
        shards=2,
        evaluate_every=2,
        run_dir=tmp_path / "run",
        checkpoint=CheckpointConfig(every_epochs=None),
    )
    train(given, 2)
    assert log == [
        "start 3 steps",
        "step 1", "step 2", "evaluation 2", "step 3",
        "epoch 0", "evaluation 3", "checkpoint 3", "end None",
    ]  # fmt: skip


def test_observers_on_the_main_rank_and_modifiers_on_every_rank() -> None:
    watched: list[list[str]] = []
    meddled: list[list[str]] = []

    def callbacks() -> list[Any]:
        watched.append([])
        meddled.append([])
        return [Watcher(watched[-1]), Meddler(meddled[-1], stop_after=1)]

    outcome = train(job(mlp(), DATA, epochs=2, global_batch=6, shards=3), 3, callbacks)
    assert sorted(map(len, watched)) == [0, 0, 4]
    assert meddled == [["batch", "gradients", "stop? 1"]] * 3
    assert outcome.history.stopped == "Meddler: enough"


class Flip(Modifier):
    """Changes what is learned: the same on every worker."""

    def __init__(self) -> None:
        self.turns = 0

    def change_batch(self, batch: Any) -> Any:
        x, y = batch
        return x, -y

    def change_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.turns += 1
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(1.0 / self.turns)

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = state["turns"]


def test_what_modifiers_change_and_keep(tmp_path: Path) -> None:
    given = job(mlp(), DATA, epochs=2, global_batch=6, shards=3)
    hashes = {train(given, workers, lambda: [Flip()]).hash for workers in (1, 2, 3)}
    assert len(hashes) == 1
    assert hashes != {train(given).hash}
    first = job(mlp(), DATA, max_steps=2, global_batch=6, shards=3, run_dir=tmp_path / "run")
    train(first, 3, lambda: [Flip()])
    second = job(mlp(), DATA, epochs=2, global_batch=6, shards=3, run_dir=tmp_path / "run", resume="auto")
    assert {train(second, 2, lambda: [Flip()]).hash} == hashes


class Broken(Observer):
    def on_step(self, record: Any) -> None:
        raise ValueError("no")


def test_an_observer_that_raises_is_named() -> None:
    with pytest.raises(UsageError, match="the observer Broken raised ValueError in on_step at step 1: no"):
        train(job(mlp(), DATA, callbacks=[Broken()], max_steps=2), 2)


def test_an_objective_that_raises_says_where() -> None:
    def objective(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("bad batch")

    with pytest.raises(RuntimeError, match="bad batch") as raised:
        train(job(mlp(), DATA, objective=objective, max_steps=2, shards=2))
    assert "in epoch 0, step 1, shard 0, a micro-batch of 6" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: loss.item(), "returned a float as its loss"),
        (lambda loss: loss.expand(3), r"a tensor of shape \(3,\)"),
        (lambda loss: (loss, loss, loss), "returned a tuple of 3"),
        (lambda loss: (loss, {f"m{i}": i for i in range(17)}), "returned 17 metrics, and 16 travel"),
    ],
)
def test_objectives_that_return_something_else(result: Any, message: str) -> None:
    def objective(model: nn.Module, batch: Any) -> Any:
        return result(nn.functional.mse_loss(model(batch[0]), batch[1]))

    with pytest.raises(UsageError, match=message):
        train(job(mlp(), DATA, objective=objective, max_steps=2))


def test_metrics_that_change_are_refused() -> None:
    turn = iter(range(100))

    def objective(model: nn.Module, batch: Any) -> Any:
        return nn.functional.mse_loss(model(batch[0]), batch[1]), {f"metric{next(turn)}": 1.0}

    with pytest.raises(UsageError, match=r"returned metrics \['metric1'\], and earlier \['metric0'\]"):
        train(job(mlp(), DATA, objective=objective, max_steps=2, shards=2))


def test_metrics_are_means_over_samples() -> None:
    """Of uneven shards, some of them empty in the first step already."""
    x, y = regression(5)

    def objective(model: nn.Module, batch: Any) -> Any:
        inputs, target = batch
        return nn.functional.mse_loss(model(inputs), target), {"first": inputs[:, 0].mean(), "one": 1}

    for workers in (1, 2, 4):
        given = job(mlp(), (x, y), objective=objective, global_batch=8, shards=4, max_steps=1)
        (record,) = train(given, workers).history.steps
        assert record.metrics["one"] == pytest.approx(1.0)
        assert record.metrics["first"] == pytest.approx(float(x[:, 0].mean()), rel=1e-5)
        assert record.samples == 5


def test_early_stopping_ends_all_workers_alike() -> None:
    given = job(
        mlp(),
        DATA,
        validation=DATA,
        epochs=9,
        optimizer=lambda p: torch.optim.SGD(p, 0.0),
        early_stopping=EarlyStopping(patience=2),
    )
    for workers in (1, 2):
        history = train(given, workers).history
        assert len(history.epochs) == 3
        assert history.stopped is not None
