"""Settings of a run: files, overrides and round trips, each field's own bounds, and what defines a run."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings, strategies as st

import paceline
from paceline.core import config as core_config
from paceline.core.errors import ConfigError
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.train_config import (
    CheckpointConfig,
    DynamicBatch,
    EarlyStopping,
    GradientCompression,
    LossScaling,
    TrainConfig,
    changes_of_definition,
    definition,
    to_toml,
)

FULL = TrainConfig(
    workers=4,
    shards=8,
    global_batch=256,
    epochs=3,
    max_steps=1000,
    seed=7,
    precision="fp16",
    loss_scaling=LossScaling(initial=1024.0, growth_interval=100),
    micro_batch=16,
    clip_norm=1.0,
    lr_rule="sqrt",
    warmup_steps=10,
    schedule="cosine",
    dynamic_batch=DynamicBatch(32, 512, 0.5),
    compression=GradientCompression(kind="top-k", keep=0.05),
    compile=True,
    activation_checkpointing=("Block", "Attention"),
    threads=2,
    device="cpu",
    drop_last=True,
    evaluate_every=50,
    early_stopping=EarlyStopping(metric="accuracy", mode="max", patience=2, min_delta=1e-3),
    audit_every=5,
    timeout=30.5,
    checkpoint=CheckpointConfig(every_steps=20, every_epochs=None, keep_every=100, url="memory://x"),
    run_dir="somewhere",
    name="digits-1.2",
    resume=12,
)


def warm(step: int) -> float:
    return min(1.0, step / 10)


@pytest.mark.parametrize("config", [TrainConfig(), FULL], ids=["defaults", "everything"])
def test_toml_json_and_yaml_read_back_to_an_equal_object(tmp_path, config):
    toml = tmp_path / "c.toml"
    toml.write_text(to_toml(config))
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    (tmp_path / "c.json").write_text(json.dumps(plain))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(plain))
    for name in ("c.toml", "c.json", "c.yaml"):
        assert core_config.load(TrainConfig, tmp_path / name) == config


@settings(max_examples=50, deadline=None)
@given(
    clip=st.none() | st.floats(min_value=1e-300, max_value=1e300),
    every=st.none() | st.integers(1, 10**9),
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    noise=st.none() | st.builds(DynamicBatch, st.integers(1, 9), st.integers(9, 10**6), st.floats(1e-9, 1e9)),
    classes=st.booleans() | st.tuples(st.text("AbC", min_size=1)),
    resume=st.none() | st.integers(0, 10**9) | st.text('abé"\\ ', min_size=1),
)
def test_any_settings_survive_toml_bit_for_bit(clip, every, schedule, noise, classes, resume):
    config = TrainConfig(
        clip_norm=clip,
        schedule=schedule,
        dynamic_batch=noise,
        activation_checkpointing=classes,
        checkpoint=CheckpointConfig(every_epochs=every),
        resume=resume,
    )
    assert core_config.load(TrainConfig, tomllib.loads(to_toml(config))) == config


def test_overrides_win_over_files_and_reach_into_tables(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("workers = 2\n[checkpoint]\nkeep_last = 5\n")
    config = core_config.load(
        TrainConfig,
        path,
        overrides=[
            "workers=4",
            "checkpoint.every_steps=10",
            "schedule=cosine",
            "clip_norm=none",
            "global_batch=1e3",
            "dynamic_batch.min=8",
            "dynamic_batch.max=64",
            'activation_checkpointing=["Block"]',
        ],
    )
    assert config.workers == 4
    assert config.global_batch == 1000
    assert isinstance(config.global_batch, int)
    assert config.checkpoint == CheckpointConfig(every_steps=10, keep_last=5)
    assert config.dynamic_batch == DynamicBatch(8, 64)
    assert config.activation_checkpointing == ("Block",)
    assert config.schedule == "cosine"


def test_an_unknown_schedule_names_the_known_ones():
    with pytest.raises(ConfigError, match="'constant', 'linear', 'cosine'"):
        core_config.load(TrainConfig, overrides=["schedule=cosin"])
    with pytest.raises(ConfigError, match=r"TrainConfig: schedule: expected one of 'constant'"):
        TrainConfig(schedule="cosin")  # type: ignore[arg-type]


def test_a_function_is_written_as_its_name_and_refused_when_read(tmp_path):
    config = TrainConfig(schedule=warm, epochs=2)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert "test_train_config.warm" in path.read_text()
    with pytest.raises(ConfigError, match=r"schedule: expected .* given 'only in code: function tests"):
        core_config.load(TrainConfig, path)


def test_a_function_can_be_given_in_a_mapping():
    assert core_config.load(TrainConfig, {"schedule": warm}).schedule is warm


@pytest.mark.parametrize(
    "engine", [paceline.Ray, paceline.Ssh, paceline.Slurm, paceline.Kubernetes, paceline.Mpi]
)
def test_the_class_of_an_engine_is_no_engine(engine):
    name = engine.__name__
    with pytest.raises(ConfigError, match=f"engine is the class {name}, and not an engine") as caught:
        TrainConfig(engine=engine)
    assert caught.value.remedy == f"write engine=paceline.{name}(...)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "workers=0, which is less than 1"),
        ({"workers": "4"}, r"workers: expected int, given '4' \(str\)"),
        ({"workers": True}, "workers: expected int"),
        ({"workers": 2.5}, "workers: expected int, given 2.5"),
        ({"shards": 0}, "shards=0, which is less than 1"),
        ({"global_batch": -3}, "global_batch=-3, which is less than 1"),
        ({"epochs": 0}, "epochs=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"seed": -1}, "seed=-1, which is less than 0"),
        ({"seed": 1 << 63}, "needs 64 bits, and a seed has 63"),
        ({"mode": "exakt"}, "mode: expected one of 'exact', 'fast'"),
        ({"precision": "fp8"}, "precision: expected one of 'fp32', 'bf16', 'fp16'"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"clip_norm": 0.0}, "clip_norm=0.0, which is not a positive number"),
        ({"clip_norm": math.nan}, "clip_norm=nan"),
        ({"timeout": math.inf}, "timeout=inf"),
        ({"log_every": 0}, "log_every=0"),
        ({"name": "a/b"}, "name='a/b' cannot be part of a folder's name"),
        ({"name": ""}, "name=''"),
        ({"name": "a+2"}, "cannot be part"),
        ({"run_dir": ""}, "run_dir is empty"),
        ({"resume": ""}, "resume is empty"),
        ({"resume": True}, "resume"),
        ({"resume": -1}, "resume=-1 is neither a version nor a tag"),
        ({"activation_checkpointing": ("",)}, "empty class name"),
        ({"checkpoint": {"keep_lst": 3}}, "unknown key checkpoint.keep_lst"),
        ({"dynamic_batch": {"min": 3}}, "dynamic_batch.max is missing"),
    ],
)
def test_a_value_that_cannot_be_is_refused_when_it_is_given(change, message):
    with pytest.raises(ConfigError, match=message) as raised:
        TrainConfig(**change)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossScaling(initial=0.0), "initial=0.0, which is not a positive number"),
        (lambda: LossScaling(growth=1.0), "growth=1.0, which is not between 1 and inf"),
        (lambda: LossScaling(backoff=1.0), "backoff=1.0, which is not between 0 and 1"),
        (lambda: LossScaling(growth_interval=0), "growth_interval=0"),
        (lambda: EarlyStopping(patience=0), "patience=0"),
        (lambda: EarlyStopping(min_delta=-0.1), "min_delta=-0.1"),
        (lambda: EarlyStopping(metric=""), "metric is empty"),
        (lambda: GradientCompression(kind="top-k", keep=0.0), "keep=0.0"),
        (lambda: CheckpointConfig(keep_last=0), "keep_last=0, which is less than 1"),
        (lambda: CheckpointConfig(every_steps=0), "every_steps=0"),
        (lambda: DynamicBatch(64, 32), "max=32 is less than min=64"),
        (lambda: DynamicBatch(0, 32), "min=0"),
        (lambda: DynamicBatch(1, 32, 0.0), "variance_threshold=0.0"),
        (lambda: DynamicBatch(1, 32, smoothing=1.0), "smoothing=1.0"),
    ],
)
def test_the_smaller_settings_check_themselves_too(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_error_in_a_file_names_the_file_and_the_value(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("global_batch = 0\n")
    with pytest.raises(ConfigError, match="global_batch=0, which is less than 1") as raised:
        core_config.load(TrainConfig, path)
    assert "run.toml" in str(raised.value)


def test_paths_are_welcome_and_tables_may_be_given_as_dicts():
    config = TrainConfig(run_dir=Path("a") / "b", checkpoint={"keep_last": 2})  # type: ignore[arg-type]
    assert config.run_dir == str(Path("a/b"))
    assert config.checkpoint == CheckpointConfig(keep_last=2)


def test_what_is_left_open_is_filled_in_once():
    config = TrainConfig(workers=3).resolved(cores=16)
    assert (config.shards, config.epochs, config.max_steps, config.threads) == (4, 1, None, 4)
    assert dataclasses.replace(config, workers=1).resolved(cores=64) == dataclasses.replace(config, workers=1)
    assert TrainConfig(max_steps=9).resolved(cores=2).epochs is None
    assert TrainConfig(shards=8).resolved(cores=2).threads == 1


@pytest.mark.parametrize(
    ("settings", "shards"),
    [
        ({"global_batch": 256}, 8),
        ({"global_batch": 256, "workers": 8}, 16),
        ({"global_batch": 256, "workers": 12}, 32),
        ({"global_batch": 256, "workers": 2, "fault_tolerance": FaultTolerance(max_workers=12)}, 32),
        ({"global_batch": 40, "workers": 4}, 5),
        ({"global_batch": 32}, 4),
        ({"global_batch": 12}, 4),
        ({"global_batch": 3}, 3),
        ({"global_batch": 3, "workers": 2}, 3),
        ({"global_batch": 32, "workers": 9}, 9),
        ({"global_batch": 256, "micro_batch": 64}, 4),
        ({"global_batch": 256, "micro_batch": "auto"}, 8),
        ({"dynamic_batch": DynamicBatch(16, 512)}, 4),
        ({"global_batch": 256, "workers": 3, "mode": "fast"}, 3),
    ],
)
def test_shards_that_are_left_open_leave_room_to_grow(settings, shards):
    assert TrainConfig(**settings).resolved(cores=8).shards == shards


@pytest.mark.parametrize("batch", [4, 7, 12, 32, 100, 256])
def test_up_to_four_workers_have_one_definition(batch):
    defined = [
        definition(TrainConfig(workers=n, global_batch=batch).resolved(cores=16)) for n in (1, 2, 3, 4)
    ]
    assert all(one == defined[0] for one in defined)


def test_a_run_that_is_to_grow_has_one_definition_whatever_it_begins_with():
    grown = FaultTolerance(max_workers=12)
    begun = [TrainConfig(workers=n, fault_tolerance=grown).resolved(cores=24) for n in (1, 5, 12)]
    assert all(definition(one) == definition(begun[0]) for one in begun)
    assert {one.threads for one in begun} == {2}
    assert definition(TrainConfig(workers=12).resolved(cores=24)) == definition(begun[0])


def test_audit_alone_is_every_hundred_steps():
    assert TrainConfig(audit=True).resolved(2).audit_every == 100
    assert TrainConfig(audit=True, audit_every=7).resolved(2).audit_every == 7
    assert TrainConfig(audit_every=7).resolved(2).audit_every == 7
    assert TrainConfig().resolved(2).audit_every == 0


def test_only_what_the_weights_depend_on_defines_a_run():
    run = TrainConfig(workers=4, epochs=2, schedule="constant").resolved(8)
    same = dataclasses.replace(run, workers=1, log_every=7, epochs=5, run_dir="x", progress=False)
    assert changes_of_definition(definition(run), definition(same)) == []
    other = dataclasses.replace(run, seed=1, clip_norm=2.0)
    assert changes_of_definition(definition(run), definition(other)) == [
        "seed: 0 -> 1",
        "clip_norm: None -> 2.0",
    ]
    cosine = dataclasses.replace(run, schedule="cosine")
    longer = dataclasses.replace(cosine, epochs=5)
    assert changes_of_definition(definition(cosine), definition(longer)) == ["epochs: 2 -> 5"]
    assert json.loads(json.dumps(definition(FULL))) == definition(FULL)


def test_a_function_defines_a_run_by_its_name():
    run = definition(TrainConfig(schedule=warm))
    assert run == definition(TrainConfig(schedule=warm))
    assert "warm" in run["schedule"]
    assert run != definition(TrainConfig(schedule=lambda step: 1.0))


def test_settings_history_and_callbacks_import_without_torch():
    modules = (
        "train.settings.conflicts, train.settings.dynamic_batch, train.settings.schedule, train.callbacks, "
        "train.history, train.state.run_folder, monitor.plot, monitor.progress"
    )
    imports = "\n".join(f"import paceline.{name}" for name in modules.split(", "))
    script = f"import sys\n{imports}\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
