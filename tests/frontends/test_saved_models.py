"""Weights of a checkpoint in one line: `trainer.load` after `fit` and in a new process, `paceline.load_model`
for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import UsageError
from paceline.train.state.model_state import state_hash
from paceline.train.state.run_folder import RunFolder

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X[:, :2])


def build(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))


def trainer_in(folder: Path, **given: Any) -> paceline.Trainer:
    settings: dict[str, Any] = {
        "global_batch": 12,
        "epochs": 3,
        "threads": 1,
        "progress": False,
        "run_dir": folder,
        "checkpoint": paceline.CheckpointConfig(every_epochs=1, metric="loss", mode="max"),
    }
    return paceline.Trainer(
        build,
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=paceline.TrainConfig(**{**settings, **given}),
    )


def test_a_checkpoint_is_loaded_in_one_line(tmp_path: Path) -> None:
    """The mode is "max", so that the best version, with the highest loss, is the first and not the last."""
    folder = tmp_path / "run"
    trainer = trainer_in(folder)
    with pytest.raises(UsageError, match=r"there is no run at .*run to load from"):
        trainer.load("best")
    history = trainer.fit((X, Y), (X[:7], Y[:7]))
    trained = trainer.model
    assert isinstance(trained, nn.Module)
    store = CheckpointStore(folder / "checkpoints")
    store.tag(2, "second")
    losses = [evaluation.loss for evaluation in history.evaluations]
    assert losses == sorted(losses, reverse=True)

    assert trainer.load("best") is trained
    best = state_hash(trained)
    assert best != history.state_hash
    assert trainer.evaluate((X[:7], Y[:7]))["loss"] == losses[0]
    assert state_hash(trainer.load("last")) == history.state_hash
    assert state_hash(trainer.load("best", mode="min")) == history.state_hash
    second = state_hash(trainer.load("second"))
    assert second == state_hash(trainer.load(2)) != best

    # In a new process there is only the folder's name.
    other = trainer_in(folder)
    assert state_hash(other.load("best")) == best
    assert other.evaluate((X[:7], Y[:7]))["loss"] == losses[0]

    # Opened for inference: the recorded settings say what the best is.
    model = paceline.load_model(folder, build)
    assert state_hash(model) == best
    assert not model.training
    assert state_hash(paceline.load_model(folder, build(), "last")) == history.state_hash
    assert state_hash(paceline.load_model(str(folder), build, version="second")) == second
    assert state_hash(paceline.load_model(folder / "checkpoints", build, 2)) == second
    assert state_hash(paceline.load_model(folder, build, mode="min")) == history.state_hash


def test_another_model_another_run_and_another_version_are_refused(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path / "run", epochs=1)
    trainer.fit((X, Y))
    model = build(outputs=3)
    before = state_hash(model)
    shapes = (
        r"2.weight is torch.float32 \(3, 8\) in the model and torch.float32 \(2, 8\) in the checkpoint; 2.b"
    )
    with pytest.raises(UsageError, match=shapes):
        paceline.load_model(tmp_path / "run", model, "last")
    assert state_hash(model) == before
    with pytest.raises(UsageError, match="only in the checkpoint"):
        paceline.load_model(tmp_path / "run", lambda: nn.Linear(5, 8), "last")
    with pytest.raises(UsageError, match=r"no checkpoint .* has the metric 'loss'"):
        trainer.load("best")  # there was no validation data
    with pytest.raises(UsageError, match="there is no checkpoint 'golden'"):
        trainer.load("golden")
    with pytest.raises(UsageError, match="there is no checkpoint 9"):
        trainer.load(9)
    with pytest.raises(UsageError, match="there is no run at"):
        paceline.load_model(tmp_path / "elsewhere", build)
    with pytest.raises(UsageError, match="the model is a str"):
        paceline.load_model(tmp_path / "run", "resnet")  # type: ignore[arg-type]


def test_a_run_without_a_folder_of_its_own_name_is_the_newest_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="there is no run called 'train' below runs/"):
        trainer_in(tmp_path, run_dir=None).load()
    made = RunFolder.create(paceline.TrainConfig())
    with pytest.raises(UsageError, match=f"no checkpoint in {made.checkpoints}"):
        trainer_in(tmp_path, run_dir=None).load("last")
