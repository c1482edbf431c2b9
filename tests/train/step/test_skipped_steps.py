"""`nonfinite="skip"`: a step whose loss or gradient is not finite changes nothing but the position, on any
number of ranks; and `log_grad_norm`, which changes nothing at all."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import hashes, job, mlp, regression, seeded, train
from torch import Tensor, nn

from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import ConfigError
from paceline.train.settings.conflicts import check
from paceline.train.settings.train_config import (
    CheckpointConfig,
    DynamicBatch,
    GradientCompression,
    definition,
)

X, Y = regression(29)
SPOILED = X.clone()
SPOILED[7] = math.nan


def normed() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


class Root(nn.Module):
    """Its loss is finite where its gradient is not: the slope of a root at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return y + torch.where(x[:, :1] == 7.0, (0.0 * y).abs().sqrt(), 0.0)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.01)


def skipping(**given: Any) -> Any:
    parts: dict[str, Any] = {"optimizer": adam, "epochs": 2, "shards": 4, "nonfinite": "skip", **given}
    return job(parts.pop("model", None) or normed(), parts.pop("data", (SPOILED, Y)), **parts)


def test_a_spoiled_step_leaves_weights_buffers_optimizer_and_scheduler_as_they_were(tmp_path: Path) -> None:
    keeping = CheckpointConfig(every_steps=1, keep_last=50)
    given = skipping(run_dir=tmp_path / "run", checkpoint=keeping, scheduler_interval="step")
    given = dataclasses.replace(
        given, scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    )
    ended = train(given, 2)
    records = ended.history.steps
    bad = [record.step for record in records if record.skipped]
    assert [math.isnan(record.loss) for record in records] == [record.skipped for record in records]
    assert len(bad) == ended.history.skipped_steps == 2
    # Each is counted, with its samples, and leaves the means alone.
    assert [(epoch.steps, epoch.samples, epoch.skipped) for epoch in ended.history.epochs] == [(3, 29, 1)] * 2
    assert all(math.isfinite(epoch.loss) for epoch in ended.history.epochs)
    assert math.isfinite(ended.history.final_loss)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    by_step = {one.info.step: one.version for one in store.manifests()}
    at, before = bad[-1], bad[-1] - 1
    one, other = store.open(by_step[at]), store.open(by_step[before])
    assert [dict(one.tensors()).keys(), one.state["schedulers"], one.state["optimizers"]] == [
        dict(other.tensors()).keys(),
        other.state["schedulers"],
        other.state["optimizers"],
    ]
    assert all(torch.equal(tensor, dict(other.tensors())[name]) for name, tensor in one.tensors().items())
    again = skipping(
        run_dir=tmp_path / "run", checkpoint=keeping, scheduler_interval="step", resume=by_step[before]
    )
    assert train(dataclasses.replace(again, scheduler=given.scheduler)).hash == ended.hash


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"shards": 1},
        {"compression": GradientCompression(kind="int8")},
        {"dynamic_batch": DynamicBatch(8, 16, variance_threshold=0.05, hold=1), "global_batch": 8},
        {"clip_norm": 0.5, "micro_batch": 1},
        {"precision": "fp16"},
        {"model": Root(), "data": (X.index_fill(0, torch.tensor([7]), 7.0), Y)},
    ],
    ids=["plain", "one shard", "compressed", "dynamic", "clipped", "fp16", "gradient"],
)
def test_all_ranks_skip_alike(more: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    given = skipping(**{"model": mlp(), **more})
    with caplog.at_level(logging.WARNING):
        ended = train(given)
    assert ended.history.skipped_steps >= 2
    assert all(torch.isfinite(one).all() for one in ended.module.parameters())
    assert "changed no weight" in caplog.text
    assert set(hashes(given, (1,) if more.get("shards") == 1 else (2, 4))) == {ended.hash}
    good = dataclasses.replace(given, train=(X, Y)) if "data" not in more else given
    if good is not given:
        warned = dataclasses.replace(good, config=dataclasses.replace(good.config, nonfinite="warn"))
        assert train(good).hash == train(warned).hash


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(ConfigError, match='nonfinite="skip" for mode="fast"'):
        check(dataclasses.replace(skipping().config, mode="fast", shards=None, workers=1), samples=29)
    # Part of the run's definition, unlike the two others.
    assert definition(skipping().config)["nonfinite"] == "skip"
    assert "nonfinite" not in definition(skipping(nonfinite="stop").config)


@pytest.mark.parametrize("more", [{}, {"clip_norm": 0.1}, {"precision": "fp16"}])
def test_the_norm_is_measured_without_clipping_and_changes_no_bit(more: dict[str, Any]) -> None:
    plain = skipping(model=mlp(), data=(X, Y), nonfinite="warn", **more)
    logged = dataclasses.replace(plain, config=dataclasses.replace(plain.config, log_grad_norm=True))
    quiet, loud = train(plain), train(logged)
    assert quiet.hash == loud.hash
    norms = [record.grad_norm for record in loud.history.steps if not record.skipped]
    assert norms
    assert all(norm is not None and 0.0 < norm < 10.0 for norm in norms)
    assert ([record.grad_norm for record in quiet.history.steps] == norms) == ("clip_norm" in more)
    two = train(logged, 2).history.steps
    assert [record.grad_norm for record in two if not record.skipped] == norms


def test_the_norm_every_few_steps() -> None:
    plain = skipping(model=mlp(), data=(X, Y), nonfinite="warn")
    every, third = (
        train(dataclasses.replace(plain, config=dataclasses.replace(plain.config, log_grad_norm=interval)))
        for interval in (True, 3)
    )
    expected = [record.grad_norm if record.step % 3 == 0 else None for record in every.history.steps]
    assert [record.grad_norm for record in third.history.steps] == expected
    assert any(expected)
    with pytest.raises(ConfigError, match="log_grad_norm=-1"):
        dataclasses.replace(plain.config, log_grad_norm=-1)
