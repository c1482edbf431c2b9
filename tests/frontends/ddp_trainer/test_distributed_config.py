"""`DistributedConfig`: its global meaning, its files, and what is refused, with the sum."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import paceline
from paceline.cli.main import app
from paceline.core.errors import ConfigError, PlatformError, UnavailableError, UsageError
from paceline.frontends import overrides
from paceline.frontends.ddp_trainer import distributed_config
from paceline.frontends.framework_trainers.backend_choice import settings_for_ray
from paceline.frontends.overrides import Overrides


def test_the_global_meaning() -> None:
    config = paceline.DistributedConfig(
        num_gpus=4,
        batch_size=8,
        gradient_accumulation_steps=3,
        epochs=5,
        mixed_precision=True,
        gradient_clipping=0.5,
        checkpoint_frequency=2,
        checkpoint_dir="somewhere",
        log_every_n_steps=7,
    )
    assert config.effective_batch == 96
    assert config.arithmetic == (
        "global batch 96 = batch_size 8 x gradient_accumulation_steps 3 x num_gpus 4"
    )
    made = config.to_train_config()
    assert (made.workers, made.shards, made.global_batch) == (4, 12, 96)
    assert (made.epochs, made.precision, made.clip_norm, made.log_every) == (5, "fp16", 0.5, 7)
    assert (made.checkpoint.every_epochs, made.checkpoint.every_steps) == (2, None)
    assert (made.run_dir, made.checkpoint.url) == ("somewhere", None)
    assert made.lr_rule == "none", "nothing is scaled unless asked"


def test_defaults() -> None:
    config = paceline.DistributedConfig()
    assert (config.batch_size, config.epochs, config.learning_rate) == (32, 1, 1e-3)
    assert (config.backend, config.communication_backend) == ("pytorch-ddp", None)
    made = config.to_train_config()
    assert (made.precision, made.clip_norm, made.run_dir) == ("fp32", None, None)
    assert made.checkpoint == paceline.CheckpointConfig()


def test_checkpoints_at_a_url() -> None:
    made = paceline.DistributedConfig(num_gpus=1, checkpoint_dir="s3://bucket/run").to_train_config()
    assert (made.run_dir, made.checkpoint.url) == (None, "s3://bucket/run")


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ({"num_gpus": 8, "num_nodes": 2, "gpus_per_node": 4}, 8),
        ({"num_nodes": 2, "gpus_per_node": 3}, 6),
        ({"num_gpus": 6, "num_nodes": 3}, 6),
    ],
)
def test_nodes(given: dict[str, Any], workers: int) -> None:
    assert paceline.DistributedConfig(**given).workers == workers


def test_the_number_of_the_command_and_of_the_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with overrides.in_force(Overrides(options={"workers": 3})):
        assert paceline.DistributedConfig(num_gpus=2, batch_size=4).effective_batch == 12
    with overrides.in_force(Overrides(assignments=("workers=5",))):
        assert paceline.DistributedConfig().workers == 5
    (tmp_path / "run.toml").write_text("workers = 6")
    with overrides.in_force(Overrides(file=str(tmp_path / "run.toml"))):
        assert paceline.DistributedConfig().workers == 6
    with overrides.in_force(Overrides(options={"seed": 1})):
        assert paceline.DistributedConfig(num_gpus=2).workers == 2
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "1"), ("LOCAL_RANK", "1"), ("MASTER_ADDR", "here")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert paceline.DistributedConfig().workers == 4


def test_the_number_of_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import paceline\nprint(paceline.DistributedConfig(batch_size=4).effective_batch)\n")
    done = CliRunner().invoke(app, ["train", str(script), "--num-gpus", "3"])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "12"), done.output


@pytest.mark.parametrize("name", ["run.toml", "run.json", "below/run.yaml", "run.yml"])
def test_files(tmp_path: Path, name: str) -> None:
    config = paceline.DistributedConfig(
        num_gpus=8,
        num_nodes=2,
        gpus_per_node=4,
        learning_rate=2.5e-4,
        communication_backend="gloo",
        gradient_clipping=1.0,
        tensorboard=True,
        checkpoint_dir=str(tmp_path),
    )
    assert config.save(tmp_path / name) == tmp_path / name
    assert paceline.DistributedConfig.load(tmp_path / name) == config


def test_a_file_that_is_no_file_of_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.ini' is not one of .toml, .json, .yaml, .yml"):
        paceline.DistributedConfig().save(tmp_path / "run.ini")
    (tmp_path / "run.toml").write_text("batchsize = 3\n")
    with pytest.raises(ConfigError, match="batchsize"):
        paceline.DistributedConfig.load(tmp_path / "run.toml")
    (tmp_path / "file").touch()
    with pytest.raises(PlatformError, match="cannot be written"):
        paceline.DistributedConfig().save(tmp_path / "file" / "run.toml")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"num_gpus": 8, "num_nodes": 2, "gpus_per_node": 3},
            r"num_gpus=8 in 2 nodes of 3: num_nodes=2 x gpus_per_node=3 = 6, not 8",
        ),
        ({"num_gpus": 7, "num_nodes": 2}, r"7 / 2 = 3.5 for each"),
        ({"num_gpus": 0}, "num_gpus=0, which is less than 1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"backend": "jax"}, "backend"),
        ({"communication_backend": "rdma"}, "communication_backend"),
        ({"checkpoint_dir": ""}, "checkpoint_dir is empty"),
    ],
)
def test_refusals(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        paceline.DistributedConfig(**given)


@pytest.mark.parametrize("backend", ["horovod", "ray", "tensorflow"])
def test_a_backend_whose_package_is_missing_says_what_to_install(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = paceline.DistributedConfig(backend=backend)  # a file of settings may name it
    monkeypatch.setattr(distributed_config, "find_spec", lambda name: None)
    for use in (config.to_train_config, lambda: paceline.make_trainer(nn.Linear(1, 1), config)):
        with pytest.raises(UnavailableError, match=f"needs the package {backend}, which is not") as info:
            use()
        assert "pip install" in info.value.remedy
        assert 'backend="pytorch-ddp"' in info.value.remedy
    monkeypatch.setattr(distributed_config, "find_spec", lambda name: object())
    with pytest.raises(UsageError, match="settings of a training that PyTorch itself distributes") as other:
        config.to_train_config()
    assert "paceline.make_trainer(model, config)" in other.value.remedy


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="backend='mxnet' is unknown"):
        distributed_config.check_backend("mxnet")


def test_the_settings_choose_their_trainer() -> None:
    config = paceline.DistributedConfig(
        num_gpus=2,
        batch_size=8,
        gradient_accumulation_steps=3,
        learning_rate=0.5,
        checkpoint_dir="runs/x",
        checkpoint_frequency=2,
        communication_backend="nccl",
    )
    trainer = paceline.make_trainer(nn.Linear(1, 1), config, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    assert isinstance(trainer, paceline.PyTorchDDPTrainer)
    assert trainer.config == config
    assert settings_for_ray(config) == {
        "lr": 0.5,
        "batch_size": 48,
        "epochs": 1,
        "num_workers": 2,
        "use_gpu": True,
        "shards": 6,
        "precision": "fp32",
        "log_every": 50,
        "run_dir": "runs/x",
        "checkpoint": {"every_epochs": 2, "url": None},
    }
    elsewhere = dataclasses.replace(config, checkpoint_dir="s3://bucket/x")
    assert settings_for_ray(elsewhere)["checkpoint"] == {"every_epochs": 2, "url": "s3://bucket/x"}


@pytest.mark.parametrize("name", ["zero_stage", "deepspeed_config"])
def test_sharded_models_are_refused_by_name(name: str) -> None:
    given: dict[str, Any] = {name: 2}
    for make in (paceline.DistributedConfig, partial(paceline.PyTorchDDPTrainer, nn.Linear(1, 1))):
        with pytest.raises(ConfigError, match=f"has no setting '{name}'") as info:
            make(**given)
        assert "sharded models are to come" in info.value.remedy


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        paceline.DistributedConfig().batch_size = 3  # type: ignore[misc]
