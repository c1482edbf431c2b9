"""A file of DistributedConfig wins over whatever trainer a script calls, and one of TrainConfig stays one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from paceline import DistributedConfig, PyTorchDDPTrainer, TrainConfig
from paceline.core.errors import ConfigError
from paceline.frontends import overrides
from paceline.frontends.ddp_trainer.config_file import PerGpuFile
from paceline.frontends.overrides import PER_GPU, Overrides
from paceline.frontends.supervised_run import device_of_workers
from paceline.train.settings.train_config import to_toml

CONFIG = DistributedConfig(
    num_gpus=2,
    batch_size=8,
    gradient_accumulation_steps=3,
    epochs=4,
    learning_rate=0.25,
    gradient_clipping=1.0,
)


@pytest.mark.parametrize("suffix", ["toml", "json", "yaml"])
def test_what_save_writes_is_read_in_its_global_meaning(tmp_path: Path, suffix: str) -> None:
    found = PerGpuFile.read(str(CONFIG.save(tmp_path / f"config.{suffix}")))
    assert found is not None
    assert found.config == CONFIG
    settings = found.global_settings(None)
    meant = Overrides(settings).apply(TrainConfig(workers=7, epochs=9))
    assert (meant.workers, meant.global_batch, meant.shards) == (2, 2 * 8 * 3, 6)
    assert (meant.epochs, meant.clip_norm, meant.precision) == (4, 1.0, "fp32")
    assert "global batch 48 = batch_size 8 x" in found.arithmetic(settings)
    assert found.global_settings(4)["global_batch"] == 4 * 8 * 3  # an option's workers win


@pytest.mark.parametrize("backend", ["ray", "horovod", "tensorflow"])
def test_a_backend_does_not_change_what_the_counts_mean(tmp_path: Path, backend: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'backend = "{backend}"\nbatch_size = 8\n')
    found = PerGpuFile.read(str(path))
    assert found is not None
    settings = found.global_settings(4)
    assert settings == {"workers": 4, "shards": 4, "global_batch": 32}
    assert "global batch 32" in found.arithmetic(settings)


def test_only_what_the_file_names_wins(tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text('learning_rate = 0.5\ncheckpoint_dir = "here"\n')
    found = PerGpuFile.read(str(path))
    assert found is not None
    assert found.global_settings(None) == {"run_dir": "here"}
    path.write_text('mixed_precision = true\ncheckpoint_dir = "ftp://there/run"\n')
    found = PerGpuFile.read(str(path))
    assert found is not None
    assert found.global_settings(None) == {"precision": "fp16", "checkpoint.url": "ftp://there/run"}
    assert found.arithmetic({}) == ""


def test_a_files_learning_rate_reaches_the_trainer_that_has_one(tmp_path: Path) -> None:
    found = PerGpuFile.read(str(CONFIG.save(tmp_path / "config.json")))
    assert found is not None
    texts = tuple(f"{PER_GPU}{text}" for text in found.texts)
    with overrides.in_force(Overrides(found.global_settings(None), texts)):
        assert not overrides.per_gpu_applied()
        trainer = PyTorchDDPTrainer(nn.Linear(1, 1), batch_size=99, learning_rate=9.0)
        assert trainer.config == CONFIG
        assert overrides.per_gpu_applied()
    assert not overrides.per_gpu_applied()


def test_files_of_train_config_are_not_taken_for_it(tmp_path: Path) -> None:
    recorded = tmp_path / "config.toml"
    recorded.write_text(to_toml(TrainConfig(workers=2, epochs=3).resolved(2)))
    assert PerGpuFile.read(str(recorded)) is None
    assert Overrides(file=str(recorded)).apply(TrainConfig()).epochs == 3
    recorded.write_text("epochs = 3\n")
    assert PerGpuFile.read(str(recorded)) is None


def test_a_bad_key_is_answered_by_the_near_one(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"batch_size": 8, "num_gpus": 2, "lerning_rate": 1}')
    with pytest.raises(ConfigError, match=r"unknown key lerning_rate[\s\S]*did you mean learning_rate\?"):
        PerGpuFile.read(str(path))


@pytest.mark.parametrize(
    ("wanted", "gpus", "has_cuda", "device"),
    [
        ("auto", 2, True, "cuda"),
        ("auto", 0, True, "cpu"),
        ("auto", 2, False, "cpu"),
        ("cpu", 2, True, "cpu"),
        ("cuda", 2, True, "cuda"),
        ("cuda", 0, False, "cuda"),  # refused by the workers, with the reason
    ],
)
def test_the_caller_says_what_the_workers_will_use(
    wanted: str, gpus: int, has_cuda: bool, device: str
) -> None:
    assert device_of_workers(wanted, gpus, has_cuda) == device
