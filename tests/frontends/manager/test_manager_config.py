"""Settings of the manager: what is filled in, what they mean, and what is refused with the numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import CheckpointGranularity, DistributedTrainingManager, ManagerConfig, UsageError
from paceline.core.errors import ConfigError


def test_three_ways_to_give_them(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "world_size": 4,
        "local_rank": 2,
        "batch_size": 64,
        "checkpoint_granularity": "block",
    }
    file = tmp_path / "manager.json"
    file.write_text(json.dumps(given))
    as_object = ManagerConfig(**given)
    assert as_object.checkpoint_granularity is CheckpointGranularity.BLOCK
    for config in (given, file, str(file), as_object):
        assert DistributedTrainingManager(config).config == as_object


def test_the_launcher_fills_in_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    config = DistributedTrainingManager({"batch_size": 64}).config
    assert (config.world_size, config.local_rank) == (8, 3)


def test_alone_without_a_launcher() -> None:
    manager = DistributedTrainingManager({})
    assert (manager.world_size, manager.rank) == (1, 0)


def test_the_meaning_for_the_engine() -> None:
    config = ManagerConfig(
        world_size=4,
        batch_size=64,
        micro_batch_size=8,
        warmup_steps=10,
        max_steps=100,
        schedule="cosine",
        seed=5,
        shards=8,
    )
    engine = config.to_train_config(("Block",))
    assert (engine.workers, engine.shards, engine.global_batch, engine.micro_batch) == (4, 8, 64, 8)
    assert (engine.warmup_steps, engine.max_steps, engine.schedule, engine.seed) == (10, 100, "cosine", 5)
    assert engine.activation_checkpointing == ("Block",)
    assert (
        "batch_size=64 samples on all 4 processes together, in 8 shards of 8 samples" in config.arithmetic()
    )
    assert "micro_batch_size=8 of them at most" in config.arithmetic()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"use_model_parallel": True}, "use_model_parallel=True: .* does not exist yet"),
        ({"model_parallel_size": 2}, "model_parallel_size=2: .* does not exist yet"),
        ({"use_pipeline_parallel": True}, "use_pipeline_parallel=True: .* does not exist yet"),
        (
            {"use_pipeline_parallel": True, "num_pipeline_stages": 4},
            "num_pipeline_stages=4: .* not exist yet",
        ),
        ({"batch_size": 0}, "batch_size=0, which is less than 1"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"save_interval": 5}, "save_interval=5, and there is no checkpoint_dir"),
        ({"schedule": "linear"}, 'schedule="linear" falls to zero at max_steps'),
        ({"checkpoint_granularity": ""}, "checkpoint_granularity is empty"),
        ({"batchsize": 5}, "batchsize"),
        ({"batch_size": "many"}, "batch_size"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        DistributedTrainingManager(given)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"micro_batch_size": 9, "batch_size": 32},
            r"micro_batch_size=9 is larger than batch_size / world_size = 32 / 4 = 8",
        ),
        ({"batch_size": 3}, "batch_size=3 for world_size=4"),
        ({"use_data_parallel": False}, "use_data_parallel=False with world_size=4"),
        ({"warmup_steps": 10, "max_steps": 10}, "warmup_steps=10 of max_steps=10"),
        ({"shards": 2}, "world_size=4 for shards=2"),
    ],
)
def test_sizes_that_do_not_go_together(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        DistributedTrainingManager({"world_size": 4, "local_rank": 0, **given})


def test_what_is_no_config() -> None:
    with pytest.raises(UsageError, match="the config of a manager is an int"):
        DistributedTrainingManager(5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no_such"):
        DistributedTrainingManager("no_such.json")
