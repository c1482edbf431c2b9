"""An exported model: verified when it is loaded, and a trainer's before it has trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.core.errors import PlatformError, UsageError
from paceline.frontends.ray_trainer import model_export
from paceline.frontends.ray_trainer.tune_report import TuneReport, current_trial


def build(config: dict[str, int]) -> nn.Module:
    return nn.Sequential(nn.Linear(3, config["hidden"]), nn.BatchNorm1d(config["hidden"]))


def test_export_and_load(tmp_path: Path) -> None:
    module = build({"hidden": 4}).train()
    model_export.write(tmp_path / "export", module, {"config": {"hidden": 4}})
    loaded = paceline.RayTrainer.load(tmp_path / "export")
    assert not loaded.training
    assert module.training  # the caller's own stays as it was
    assert paceline.state_hash(loaded) == paceline.state_hash(module)
    assert torch.equal(loaded(torch.ones(1, 3)), module.eval()(torch.ones(1, 3)))
    weights = torch.load(tmp_path / "export" / "weights.pt", weights_only=True)
    assert weights.keys() == module.state_dict().keys()
    assert json.loads((tmp_path / "export" / "manifest.json").read_text())["config"] == {"hidden": 4}


def test_a_damaged_export_is_refused_before_its_code_runs(tmp_path: Path) -> None:
    model_export.write(tmp_path, build({"hidden": 4}), {})
    file = tmp_path / "model.pkl"
    damaged = bytearray(file.read_bytes())
    damaged[-20] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(PlatformError, match="is damaged"):
        paceline.RayTrainer.load(tmp_path)


def test_a_folder_without_an_export(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no exported model"):
        paceline.RayTrainer.load(tmp_path)


def test_before_fit(tmp_path: Path) -> None:
    trainer = paceline.RayTrainer(build, {"hidden": 4})
    assert trainer.best_accuracy is None
    with pytest.raises(UsageError, match="export before fit"):
        trainer.export(tmp_path)


def test_outside_of_a_trial_nothing_is_reported(tmp_path: Path) -> None:
    assert current_trial() is None
    TuneReport().finish(tmp_path)  # without Ray, which would refuse
