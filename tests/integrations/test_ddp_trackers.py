"""The DDP door turns trackers on: TensorBoard's files and MLflow's database are read back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.watched import debugged
from torch import nn

import paceline
from paceline.frontends import overrides
from paceline.frontends.overrides import Overrides

# The packages' own warnings are not ours.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

DATA = (torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with overrides.in_force(Overrides(options={"threads": 1, "progress": False, "device": "cpu"})):
        yield


def fit(folder: Path, experiment: str | None = None, **given: Any) -> paceline.History:
    trainer = paceline.PyTorchDDPTrainer(
        nn.Linear(4, 3), 1, 4, log_every_n_steps=2, checkpoint_dir=folder, **given
    )
    with debugged():
        return trainer.fit(DATA, DATA, mlflow_experiment=experiment)


@pytest.mark.parametrize("own_folder", [True, False])
def test_tensorboard(tmp_path: Path, own_folder: bool) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    place = tmp_path / "board"
    given: dict[str, Any] = {"tensorboard_dir": place} if own_folder else {"tensorboard": True}
    history = fit(tmp_path / "run", **given)
    folder = place if own_folder else tmp_path / "run" / "tensorboard"
    found = accumulator.EventAccumulator(str(folder)).Reload()
    losses = {event.step: event.value for event in found.Scalars("train/loss")}
    assert set(losses) >= {2, 4, 6, 8, 10}, "every 2 steps"
    expected = {record.step: record.loss for record in history.steps if record.step in losses}
    assert losses == pytest.approx(expected)
    written = {"validation/accuracy", "train/grad_norm", "train/comm_time", "train/data_time"}
    assert written <= set(found.Tags()["scalars"])


@pytest.mark.leaky("MLflow keeps its database open for the process")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mlflow.set_tracking_uri(uri)
    history = fit(tmp_path / "named", experiment="per gpu")
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("per gpu")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["train/loss"] == pytest.approx(history.steps[-1].loss)
    fit(tmp_path / "default", mlflow_tracking=True)
    assert client.get_experiment_by_name("paceline") is not None
