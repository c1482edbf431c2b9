"""RayTrainer on a real cluster: as a trial of Ray Tune, and its export in Ray Serve."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.ray import small_training
from tests.clusters.ray.ray_lab import RayLab

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.leaky("Ray starts and ends processes when it likes; the tests look for those of runs"),
]


def program(lab: RayLab, name: str, folder: Path, *more: str) -> dict[str, Any]:
    printed = lab.run("trainer_programs", name, lab.cluster.address, str(folder), *more, seconds=240.0)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_trials_with_agents_of_their_own_report_every_epoch(lab: RayLab, tmp_path: Path) -> None:
    found = program(lab, "tuner", tmp_path)
    expected = small_training.one_process(0.05)
    assert found["iterations"] == [3, 3]
    assert found["best"]["lr"] == 0.05
    assert found["best"]["epoch"] == 2
    assert found["best"]["loss"] == expected.epochs[-1].loss
    assert found["best"]["val_loss"] == expected.epochs[-1].validation["loss"]
    assert found["hash"] == expected.state_hash
    assert found["agents"] == ["agents", "agents"]
    assert not lab.left_running(), lab.left_running()


def test_a_trial_that_tune_stops_leaves_nothing_running(lab: RayLab, tmp_path: Path) -> None:
    assert program(lab, "run", tmp_path) == {"status": "TERMINATED", "iterations": 2}
    assert not lab.left_running(), lab.left_running()


def test_settings_of_another_backend_mean_the_same_on_ray(lab: RayLab, tmp_path: Path) -> None:
    found = program(lab, "by_settings", tmp_path)
    assert found["ray"] == found["pytorch-ddp"]
    versions = [len(list(tmp_path.glob(f"{name}/checkpoints/v*"))) for name in found]
    assert versions == [2, 2]
    assert not lab.left_running(), lab.left_running()


def test_an_export_is_served(lab: RayLab, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = program(lab, "served", tmp_path, str(port))
    expected = small_training.one_process(0.05)
    assert found["same"] == [True, True]
    assert found["hash"] == expected.state_hash
    assert found["accuracy"] == expected.best_accuracy
