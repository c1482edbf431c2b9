"""An exported model: verified when it is loaded, and a trainer's before it has trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.core.errors import PlatformError, UsageError
from paceline.data.sources import as_source
from paceline.frontends import overrides
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


def test_an_export_has_no_passwords(tmp_path: Path) -> None:
    place = "https://user:s3cret@host/versions"
    config = {
        "hidden": 4,
        "checkpoint": {"url": place},
        "places": [place],
        "also": paceline.CheckpointConfig(url=place),
        "lr": np.float64(0.5),
    }
    model_export.write(tmp_path, build({"hidden": 4}), {"config": config})
    text = (tmp_path / "manifest.json").read_text()
    assert "s3cret" not in text
    written = json.loads(text)["config"]
    assert (written["hidden"], written["lr"]) == (4, 0.5)
    assert written["checkpoint"]["url"] == written["places"][0] == "https://***@host/versions"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_export_serves_whole_numbers_of_json_as_the_dtype_of_training(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    module, inputs = nn.Linear(3, 1).to(dtype), torch.randn(8, 3, dtype=dtype)
    trainer = paceline.RayTrainer(
        module, {"batch_size": 4, "run_dir": False, "progress": False}, loss_fn=nn.MSELoss()
    )
    with overrides.in_force(overrides.Overrides({}, ("engine=none",))):  # Ray's place is this machine
        trainer.fit((inputs, torch.zeros(8, 1, dtype=dtype)))
    folder = trainer.export(tmp_path / "export")
    assert json.loads((folder / "manifest.json").read_text())["input_dtype"] == str(dtype)[6:]
    served, row = model_export.ServedModel(str(folder)), torch.tensor([[1, 0, 2]], dtype=dtype)
    assert isinstance(trainer.model, nn.Module)
    expected = trainer.model.eval()(row).tolist()
    assert served.predict([[1, 0, 2]]) == served.predict([[1.0, 0.0, 2.0]]) == expected


def test_a_model_of_whole_numbers_is_given_no_others(tmp_path: Path) -> None:
    module = nn.Embedding(4, 2)
    model_export.write(tmp_path, module, {"input_dtype": "int64"})
    served = model_export.ServedModel(str(tmp_path))
    assert served.predict([1, 3]) == module(torch.tensor([1, 3])).tolist()
    with pytest.raises(RuntimeError, match="Long"):
        served.predict([1.7])


def test_an_export_that_does_not_name_its_inputs(tmp_path: Path) -> None:
    """As an earlier Paceline wrote it, and of data that only a run reads."""
    module = nn.Linear(3, 1).double()
    served = model_export.ServedModel(str(model_export.write(tmp_path, module, {})))
    assert served.predict([[1.0, 0, 2]]) == module(torch.tensor([[1.0, 0, 2]]).double()).tolist()


class Unreadable:
    """A dataset whose files are elsewhere."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        raise FileNotFoundError("rows.bin")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"pixels": torch.zeros(4, 2, dtype=torch.uint8), "label": torch.zeros(4)}, "uint8"),
        ((torch.zeros(4, 2, dtype=torch.float16), torch.zeros(4)), "float16"),
        (iter, None),
        (Unreadable(), None),
    ],
)
def test_the_dtype_of_inputs(data: Any, expected: str | None) -> None:
    source = as_source((lambda: iter([(torch.zeros(1), 0)])) if data is iter else data)
    assert model_export.dtype_of_inputs(source) == expected


def test_outside_of_a_trial_nothing_is_reported(tmp_path: Path) -> None:
    assert current_trial() is None
    TuneReport().finish(tmp_path)  # without Ray, which would refuse
