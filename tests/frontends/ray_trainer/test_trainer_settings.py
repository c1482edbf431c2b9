"""The dict of a RayTrainer: numbers of search spaces, words of TrainConfig, mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paceline
from paceline.core.errors import ConfigError
from paceline.frontends.ray_trainer.trainer_settings import read


def test_numbers_of_search_spaces_are_numbers() -> None:
    found = read({"lr": np.float64(0.1), "batch_size": np.int64(64), "epochs": 3, "hidden": 8, "seed": 7})
    assert (found.lr, found.batch_size, found.epochs, found.run) == (0.1, 64, 3, {"seed": 7})
    assert type(found.batch_size) is int
    assert type(found.lr) is float


def test_workers_are_agents_wherever_there_is_room() -> None:
    engine = read({"num_workers": 4, "use_gpu": True, "cpus_per_worker": 2, "address": "auto"}).engine()
    assert engine == paceline.Ray(
        address="auto", nodes=4, gpus_per_node=1, cpus_per_worker=2.0, share_nodes=True
    )


def test_steps_instead_of_epochs() -> None:
    assert read({"max_steps": 10}).epochs is None
    assert read({}).epochs == 1


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"lr": 0}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"num_workers": -1}, "num_workers"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"lr": 0.1, "learning_rate": 0.2}, "lr"),
    ],
)
def test_mistakes(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(config)
    assert caught.value.facts["key"] == key


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        ({"workers": 4}, "give num_workers"),
        ({"global_batch": 64}, "give batch_size"),
        ({"engine": paceline.Ray(nodes=2)}, "RayTrainer(..., engine="),
    ],
)
def test_settings_that_have_another_name_here_are_refused(config: dict[str, Any], instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(config)
    assert instead in caught.value.remedy
    assert [caught.value.facts["key"]] == [*config]


def test_a_config_that_is_no_dict() -> None:
    with pytest.raises(ConfigError, match="config is list"):
        read([("lr", 1)])  # type: ignore[arg-type]
