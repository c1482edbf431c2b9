"""A loss that is not finite: versions with finite weights stay, and the run stops where it is asked to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.saving import tensors_at
from tests.train.small_run import adam, build, data, settings, steps_of
from torch import Tensor, nn

import paceline
from paceline.checkpoint.manifest import CheckpointInfo, CheckpointManifest, FileRecord
from paceline.checkpoint.retention import Retention, kept
from paceline.checkpoint.staging_buffer import ImageBuffer
from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import ConfigError
from paceline.train.settings.conflicts import check
from paceline.train.settings.train_config import CheckpointConfig
from paceline.train.step.misuse_guard import NonFiniteLossError


def spoiled(at: Tensor) -> tuple[Tensor, Tensor]:
    """The small run's data with one sample that makes the loss NaN."""
    x, y = data()
    x = x.clone()
    x[17] = at
    return x, y


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def fit(folder: Path, workers: int, given: Any, **changes: Any) -> Any:
    config = settings(folder, workers, **changes)
    return paceline.Trainer(build, loss, optimizer=adam, config=config).fit(given)


def versions(folder: Path) -> list[tuple[int, bool | None]]:
    store = CheckpointStore(folder / "checkpoints")
    return [(manifest.info.step, manifest.finite) for manifest in store.manifests()]


@pytest.mark.parametrize("best", [0, 2])
def test_the_newest_version_with_finite_weights_stays(tmp_path, best):
    # The sample comes in the first epoch, at a step that depends on the seed alone.
    keeping = CheckpointConfig(every_steps=1, keep_last=2, keep_best=best, metric="train_loss")
    fit(tmp_path / "run", 2, spoiled(torch.tensor(math.nan)), checkpoint=keeping)
    found = versions(tmp_path / "run")
    good = [step for step, finite in found if finite]
    bad = [step for step, finite in found if finite is False]
    assert len(bad) >= 2
    assert good
    assert max(good) < min(bad)
    # It is the very last good one: the next step is the one that went wrong.
    assert max(good) == first_bad(tmp_path / "all") - 1


def first_bad(folder: Path) -> int:
    everything = CheckpointConfig(every_steps=1, keep_last=1000)
    fit(folder, 1, spoiled(torch.tensor(math.nan)), checkpoint=everything)
    return next(step for step, finite in versions(folder) if finite is False)


@pytest.mark.parametrize(("workers", "care"), [(1, True), (3, True), (2, False)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_stopping_there(tmp_path, workers, care, value):
    folder = tmp_path / "run"
    care = paceline.FaultTolerance(enabled=care)
    given = spoiled(torch.tensor(value))
    rare = CheckpointConfig(every_steps=None, every_epochs=None)
    with pytest.raises(NonFiniteLossError, match="the loss of step") as caught:
        fit(folder, workers, given, nonfinite="stop", fault_tolerance=care, checkpoint=rare)
    at = max(steps_of(folder), default=0)
    assert caught.value.facts["step"] == at + 1
    # The step before is saved, with the bits that a run without the sample's epoch has up to there.
    assert versions(folder) == ([(at, True)] if at else [])
    quiet = fit(tmp_path / "quiet", 1, given, max_steps=at, epochs=None) if at else None
    if quiet is not None:
        saved = CheckpointStore(folder / "checkpoints").open("latest").tensors()
        other = CheckpointStore(tmp_path / "quiet" / "checkpoints").open("latest").tensors()
        assert saved.keys() == other.keys()
        for name, tensor in other.items():
            assert torch.equal(saved[name], tensor), name


def test_a_good_run_is_the_same_with_it(tmp_path):
    quiet = fit(tmp_path / "quiet", 1, data()).state_hash
    assert fit(tmp_path / "stop", 2, data(), nonfinite="stop").state_hash == quiet


def test_where_ranks_do_not_know_the_same_loss(tmp_path):
    with pytest.raises(ConfigError, match='nonfinite="stop" for mode="fast"'):
        check(settings(tmp_path, 2, mode="fast", shards=2, nonfinite="stop"), samples=100)


def manifest(version: int, finite: bool | None) -> CheckpointManifest:
    files = (FileRecord("part-00-of-01.safetensors", 1, "", 1, (), finite), FileRecord("state.json", 1, ""))
    return CheckpointManifest(
        version, 0.0, CheckpointInfo(step=version, metrics={"loss": float(version)}), files
    )


@pytest.mark.parametrize("retention", [Retention(keep_last=1), Retention(keep_last=2, keep_best=1)])
def test_what_retention_keeps(retention):
    all_of_them = [manifest(1, True), manifest(2, True), *(manifest(n, False) for n in range(3, 9))]
    assert 2 in kept(all_of_them, retention)
    # Versions of before this was noted count as good.
    assert 2 in kept(
        [manifest(1, True), manifest(2, None), manifest(3, False), manifest(4, False)], retention
    )
    assert kept([manifest(n, True) for n in range(1, 9)], Retention(keep_last=1)) == {8}
    read = CheckpointManifest.from_bytes(manifest(5, False).to_bytes())
    assert read.finite is False
    assert CheckpointManifest.from_bytes(manifest(5, None).to_bytes()).finite is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_place_is_looked_at(dtype, value):
    tensors = {**tensors_at(1), "model/large": torch.zeros(70_001, dtype=dtype)}
    buffer = ImageBuffer()
    assert buffer.finite(buffer.fill(tensors, sorted(tensors)), "model/")
    for place in (0, 31_999, 32_000, 70_000):
        broken = tensors["model/large"].clone()
        broken[place] = value
        given = {**tensors, "model/large": broken}
        assert not buffer.finite(buffer.fill(given, sorted(given)), "model/")
    # Optimizers may have such values for good reasons.
    given = {**tensors, "optimizer/0/weight/exp_avg": torch.full((7, 5), value, dtype=torch.float64)}
    assert buffer.finite(buffer.fill(given, sorted(given)), "model/")
