"""`limit_batches` and `limit_validation`: short epochs and evaluations, of data by number and of streams."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.train.running import hashes, job, mlp, regression, train
from torch.utils.data import IterableDataset

from paceline.core import journal
from paceline.core.errors import ConfigError
from paceline.monitor.audit import audit
from paceline.train.settings.conflicts import check
from paceline.train.settings.schedule import run_length
from paceline.train.settings.train_config import CheckpointConfig, DynamicBatch, TrainConfig

DATA, HELD_OUT = regression(40), regression(30, seed=1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(zip(*DATA, strict=True)))


def limited(**given: Any) -> Any:
    return job(mlp(), DATA, validation=HELD_OUT, **{"epochs": 3, "limit_batches": 2, **given})


@pytest.mark.parametrize("data", [DATA, Stream()], ids=["by number", "stream"])
def test_an_epoch_ends_after_these_steps_on_any_number_of_ranks(data: Any) -> None:
    given = dataclasses.replace(limited(), train=data)
    ended = train(given)
    assert [(one.epoch, one.steps, one.samples) for one in ended.history.epochs] == [
        (n, 2, 24) for n in range(3)
    ]
    assert [one.step for one in ended.history.evaluations] == [2, 4, 6]
    assert set(hashes(given, (2, 3))) == {ended.hash}
    longer = dataclasses.replace(given, config=dataclasses.replace(given.config, limit_batches=100))
    plain = dataclasses.replace(given, config=dataclasses.replace(given.config, limit_batches=None))
    assert train(longer).hash == train(plain).hash != ended.hash


def test_the_validation_data_is_cut_after_these_batches() -> None:
    whole, cut = train(limited()), train(limited(limit_validation=1))
    assert [one.samples for one in whole.history.evaluations] == [30] * 3
    assert [one.samples for one in cut.history.evaluations] == [12] * 3
    assert cut.hash == whole.hash
    # The first ones, with the bits of an evaluation of those alone.
    first = dataclasses.replace(limited(), validation=(HELD_OUT[0][:12], HELD_OUT[1][:12]))
    expected = [one.metrics for one in train(first).history.evaluations]
    assert [one.metrics for one in cut.history.evaluations] == expected
    stream = dataclasses.replace(limited(limit_validation=2), validation=Stream())
    for workers in (1, 2, 3):
        assert [one.samples for one in train(stream, workers).history.evaluations] == [24] * 3


def test_it_continues_from_a_version_and_is_audited(tmp_path: Path) -> None:
    run = tmp_path / "run"
    expected = train(limited()).hash
    saving = {"run_dir": run, "checkpoint": CheckpointConfig(every_steps=1)}
    train(limited(max_steps=3, **saving))
    assert train(limited(resume="auto", **saving), 2).hash == expected
    found = audit(journal.iterate(run / "journal.jsonl"))
    assert not found.wrong
    with pytest.raises(ConfigError, match="limit_batches: 2 -> 1"):
        train(limited(resume="auto", **{**saving, "limit_batches": 1}))


def test_lengths_and_what_is_refused() -> None:
    length = run_length(limited(epochs=5).config, 40)
    assert (length.steps_per_epoch, length.total_steps, length.epochs) == (2, 10, 5)
    assert run_length(limited(epochs=None, max_steps=5).config, 40).epochs == 3
    dynamic = TrainConfig(limit_batches=2, shards=2, dynamic_batch=DynamicBatch(8, 16), global_batch=8)
    with pytest.raises(ConfigError, match="limit_batches=2 with dynamic_batch"):
        check(dynamic, samples=40)
    with pytest.raises(ConfigError, match="limit_validation=1, and there is no validation data"):
        check(TrainConfig(limit_validation=1), samples=40, validation=False)
    with pytest.raises(ConfigError, match="limit_batches=0"):
        TrainConfig(limit_batches=0)
