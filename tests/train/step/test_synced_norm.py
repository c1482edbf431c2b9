"""SyncBatchNorm where a pass holds the global batch, and in a loop of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.train.running import job, regression, seeded, train
from torch import nn

import paceline
from paceline.core.errors import ConfigError, UsageError

DATA = regression(29)


def model(kind: Any) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 8), kind(8), nn.Tanh(), nn.Linear(8, 2)))


def test_a_part_of_the_batch_has_not_its_statistics() -> None:
    with pytest.raises(
        UsageError, match=r"the model's 1 is a SyncBatchNorm.* in micro-batches of 6"
    ) as caught:
        train(job(model(nn.SyncBatchNorm), DATA, epochs=1, shards=1, micro_batch=6))
    assert "micro_batch" in caught.value.remedy


def test_one_shard_is_the_global_batch() -> None:
    """Then it is BatchNorm over the whole batch, to the bit."""
    done = [
        train(job(model(kind), DATA, epochs=2, shards=1, drop_last=True))
        for kind in (nn.SyncBatchNorm, nn.BatchNorm1d)
    ]
    assert done[0].hash == done[1].hash
    mean = done[0].module.state_dict()["1.running_mean"]
    assert torch.isfinite(mean).all()
    assert mean.abs().sum() > 0


def test_a_session_refuses_it(tmp_path: Any) -> None:
    module = model(nn.SyncBatchNorm)
    config = paceline.TrainConfig(shards=2, max_steps=1, progress=False, run_dir=str(tmp_path / "run"))
    with (
        pytest.raises(UsageError, match="a loop of your own computes the 2 shards") as caught,
        paceline.session(module, torch.optim.SGD(module.parameters(), 0.1), config) as run,
    ):
        next(iter(run.microbatches(DATA)))
    assert "Trainer" in caught.value.remedy


@pytest.mark.parametrize("name", ["sync_batch_norm", "sync_batchnorm"])
def test_a_setting_of_other_trainers_is_answered(name: str) -> None:
    with pytest.raises(ConfigError, match=f"has no setting '{name}'") as caught:
        paceline.TrainConfig(**{name: True})  # type: ignore[arg-type]
    assert "convert_sync_batchnorm" in caught.value.remedy
