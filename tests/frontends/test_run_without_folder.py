"""`run_dir=False`: a run that keeps nothing leaves nothing behind, however it ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.core import config as core_config
from paceline.core.errors import ConfigError, RankFailedError, UsageError
from paceline.train.settings import conflicts

X = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X[:, :2])


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where a run would leave something: the working folder, and that for temporary files."""
    here, temporary = tmp_path / "here", tmp_path / "tmp"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return here, temporary


def trainer(objective: Any = None, **given: Any) -> paceline.Trainer:
    settings: dict[str, Any] = {
        "global_batch": 12,
        "epochs": 2,
        "threads": 1,
        "progress": False,
        "run_dir": False,
    }
    return paceline.Trainer(
        lambda: nn.Linear(5, 2),
        objective or nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=paceline.TrainConfig(**{**settings, **given}),
    )


def left(places: tuple[Path, Path]) -> list[str]:
    return [*os.listdir(places[0]), *(name for name in os.listdir(places[1]) if name.startswith("paceline"))]


def test_nothing_stays_behind_and_a_killed_worker_leaves_no_trace(places: tuple[Path, Path]) -> None:
    kept = trainer(run_dir="kept", workers=2).fit((X, Y))
    care = paceline.FaultTolerance(chaos="kill rank=1 step=3")
    run = trainer(workers=2, fault_tolerance=care)
    history = run.fit((X, Y))
    assert history.state_hash == kept.state_hash
    assert history.run_dir is None
    assert left(places) == ["kept"]
    with pytest.raises(UsageError, match="run_dir=False: the run kept no checkpoint to load"):
        run.load("last")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_run_that_fails_leaves_nothing_and_does_not_say_that_it_did(
    places: tuple[Path, Path], enabled: bool
) -> None:
    def broken(model: Any, batch: Any) -> Any:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(RankFailedError, match="on purpose") as raised:
        trainer(broken, fault_tolerance=paceline.FaultTolerance(enabled=enabled)).fit((X, Y))
    assert "is saved" not in str(raised.value)
    assert left(places) == []


def test_a_session_without_a_folder(places: tuple[Path, Path]) -> None:
    model = nn.Linear(5, 2)
    config = paceline.TrainConfig(run_dir=False, global_batch=12, progress=False)
    with paceline.session(model, torch.optim.SGD(model.parameters(), 0.1), config) as run:
        for micro in run.microbatches((X, Y)):
            run.backward(nn.functional.mse_loss(model(micro.x), micro.y))
        assert len(left(places)) == 1
    assert run.history is not None
    assert run.history.run_dir is None
    assert left(places) == []


def test_settings_that_contradict_it_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"resume='auto' with run_dir=False"):
        paceline.TrainConfig(run_dir=False, resume="auto")
    with pytest.raises(ConfigError, match="run_dir"):
        paceline.TrainConfig(run_dir=True)  # type: ignore[arg-type]
    elsewhere = paceline.CheckpointConfig(url="elsewhere")
    config = paceline.TrainConfig(run_dir=False, checkpoint=elsewhere)
    with pytest.raises(ConfigError, match=r"checkpoint.url='elsewhere' with run_dir=False"):
        conflicts.check(config, samples=24)


def test_a_file_and_an_override_can_hold_it(tmp_path: Path) -> None:
    config = paceline.TrainConfig(run_dir=False)
    (tmp_path / "run.toml").write_text(core_config.dumps(config))
    assert core_config.load(paceline.TrainConfig, tmp_path / "run.toml") == config
    assert core_config.load(paceline.TrainConfig, overrides=["run_dir=false"]).run_dir is False
