"""Settings of a run as trackers keep them."""

from __future__ import annotations

import dataclasses

import paceline
from paceline.monitor.trackers.run_settings import parameters
from paceline.train.callbacks import RunInfo


def test_settings_are_named_with_dots_and_none_holds_a_secret():
    engine = paceline.Ray(
        nodes=2, workers_per_node=3, runtime_env={"env_vars": {"WANDB_API_KEY": "hunter2"}}, address="auto"
    )
    config = paceline.TrainConfig(
        engine=engine,
        global_batch=24,
        checkpoint=paceline.CheckpointConfig(url="ftp://bob:hunter2@host/runs"),
    )
    run = RunInfo(config=config, workers=6, total_steps=None, samples=96, run_dir=None, device="cpu")
    found = parameters(run)
    assert "hunter2" not in str(found)
    assert {name: value for name, value in found.items() if name.startswith("engine")} == {
        "engine.name": "ray",
        "engine.nodes": "2",
        "engine.workers_per_node": "3",
    }
    assert found["checkpoint.url"] == "ftp://***@host/runs"
    assert (found["global_batch"], found["workers"], found["samples"]) == ("24", "6", "96")
    alone = parameters(dataclasses.replace(run, config=dataclasses.replace(config, engine=None)))
    assert not [name for name in alone if name.startswith("engine")]
