"""SGD with momentum on an embedding with sparse gradients: its momentum is a sparse tensor, and part of the
state as any other."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import wait_for
from torch import Tensor

import paceline
from paceline.checkpoint.digests import digest_of
from paceline.core import events, journal
from paceline.core.errors import UsageError
from paceline.testing.gauntlet import models
from paceline.train.history import StepRecord
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig
from paceline.train.state import modifier_states, optimizer_values

OFF = CheckpointConfig(enabled=False)


def rows(coalesced: bool) -> Tensor:
    """Index 3 comes twice where it is not coalesced."""
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    made = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), values, (5, 4), check_invariants=True)
    return made.coalesce() if coalesced else made


def same(one: Tensor, other: Tensor) -> bool:
    return (
        (one.shape, one.is_coalesced()) == (other.shape, other.is_coalesced())
        and torch.equal(one._indices(), other._indices())
        and torch.equal(one._values(), other._values())
    )


@pytest.mark.parametrize("coalesced", [False, True])
def test_the_parts_of_a_sparse_tensor_make_the_same_one(coalesced: bool) -> None:
    given = {"buffer": [rows(coalesced)]}
    tensors = dict(optimizer_values.tensors_in(given, "k"))
    assert all(tensor.layout is torch.strided for tensor in tensors.values())
    plain = optimizer_values.to_plain(given, "k", "it")
    assert same(optimizer_values.from_plain(plain, tensors.__getitem__)["buffer"][0], given["buffer"][0])
    marked, found = modifier_states.split({"m": given})
    back = modifier_states.joined(marked, found, torch.device("cpu"))
    assert same(back["m"]["buffer"][0], given["buffer"][0])


def test_a_hash_sees_values_indices_size_and_whether_it_is_coalesced() -> None:
    first, ordered = rows(False), rows(True)
    larger = torch.sparse_coo_tensor(first._indices(), first._values(), (6, 4), check_invariants=True)
    other = torch.sparse_coo_tensor(first._indices() - 1, first._values(), (5, 4), check_invariants=True)
    alone = torch.sparse_coo_tensor(ordered._indices(), ordered._values(), (5, 4), check_invariants=True)
    found = {
        digest_of(dict(optimizer_values.tensors_in(one, "k")))
        for one in (first, ordered, larger, other, alone, first * 2)
    }
    assert len(found) == 6


def test_parts_that_do_not_fit_are_refused_by_name() -> None:
    tensors = dict(optimizer_values.tensors_in(rows(False), "momentum"))
    tensors["momentum.indices"] = tensors["momentum.indices"] + 10**9
    plain = optimizer_values.to_plain(rows(False), "momentum", "it")
    with pytest.raises(UsageError, match="the parts of momentum do not make a sparse tensor"):
        optimizer_values.from_plain(plain, tensors.__getitem__)


def settings(folder: Path, workers: int, **changes: Any) -> TrainConfig:
    base = TrainConfig(
        workers=workers,
        shards=4,
        threads=1,
        global_batch=12,
        max_steps=12,
        seed=5,
        device="cpu",
        progress=False,
        run_dir=str(folder),
        checkpoint=OFF,
        fault_tolerance=paceline.FaultTolerance(backoff=0.01),
    )
    return dataclasses.replace(base, **changes)


class WaitsForReplacement(paceline.Modifier):
    """Holds the run up after a step until a worker was started a second time: else it may end before."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "journal.jsonl"

    def stop(self, record: StepRecord) -> None:
        if record.step == 6:
            wait_for(lambda: self.file.read_text().count('"worker_started"') > 2)


def fit(config: TrainConfig, *callbacks: paceline.Modifier) -> str:
    trainer = paceline.Trainer(
        models.WordBag,
        models.classify,
        optimizer=models.sparse_momentum,
        config=config,
        callbacks=callbacks,
    )
    return str(trainer.fit(models.words()).state_hash)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    alone = paceline.FaultTolerance(enabled=False)
    return fit(settings(tmp_path_factory.mktemp("alone"), 1, fault_tolerance=alone))


def test_a_replacement_gets_it_from_a_peer(tmp_path: Path, undisturbed: str) -> None:
    care = paceline.FaultTolerance(backoff=0.01, chaos="kill rank=1 step=4 phase=backward")
    waits = WaitsForReplacement(tmp_path)
    assert fit(settings(tmp_path, 2, fault_tolerance=care), waits) == undisturbed
    told = journal.read(tmp_path / "journal.jsonl").events
    assert any(event.behind for event in told if isinstance(event, events.ViewChanged))


def test_a_run_goes_on_from_a_checkpoint_that_holds_it(tmp_path: Path, undisturbed: str) -> None:
    saves = CheckpointConfig(every_steps=5)
    first = settings(tmp_path, 2, checkpoint=saves, max_steps=12)
    assert fit(first) == undisturbed
    again = dataclasses.replace(first, resume=1, run_dir=str(tmp_path), workers=1)
    assert fit(again) == undisturbed
