"""Runs over data with an order of its own: the same bits anywhere, resumed by position, and audited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.train.running import job, mlp, regression, train

from paceline.cli.audit import summary_lines
from paceline.core import events, journal
from paceline.core.errors import ConfigError, UsageError
from paceline.data.orders import LengthBuckets, OrderedData, WeightedOrder
from paceline.data.source_interface import SkippedSampleError
from paceline.frontends.trainer import Trainer
from paceline.monitor import journal_index
from paceline.monitor.audit import audit
from paceline.train.loop.recompute import replay_shard
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

DATA = regression(29)
WEIGHTS = np.arange(29) % 4


def weighted(samples: int | None = 40) -> OrderedData:
    return WeightedOrder(WEIGHTS, samples).over(DATA)


def bucketed() -> OrderedData:
    return LengthBuckets(np.arange(29) * 7 % 11, pool=2).over(DATA)


@pytest.mark.parametrize("data", [weighted, bucketed])
def test_an_order_has_the_same_bits_on_any_number_of_workers_and_resumed(data: Any, tmp_path: Path) -> None:
    done = [train(job(mlp(), data(), epochs=2), workers) for workers in (1, 2, 3, 4)]
    assert len({one.hash for one in done}) == 1
    assert done[0].hash != train(job(mlp(), DATA, epochs=2)).hash
    saved: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=2), "run_dir": tmp_path / "run"}
    train(job(mlp(), data(), max_steps=3, **saved), 2)
    assert train(job(mlp(), data(), epochs=2, resume="auto", **saved), 3).hash == done[0].hash


def test_an_epoch_has_the_draws_and_the_steps_of_the_order() -> None:
    seen: list[float] = []

    def objective(model: Any, batch: Any) -> Any:
        seen.extend(batch[0][:, 0].tolist())
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    done = train(job(mlp(), weighted(), objective=objective, epochs=1, seed=3))
    assert [record.samples for record in done.history.steps] == [12, 12, 12, 4]
    expected = WeightedOrder(WEIGHTS, 40).of_epoch(3, 0, 12).take(0, 40)
    assert seen == DATA[0][expected, 0].tolist()


def test_another_order_is_another_run(tmp_path: Path) -> None:
    saved: dict[str, Any] = {"checkpoint": CheckpointConfig(every_steps=2), "run_dir": tmp_path / "run"}
    train(job(mlp(), weighted(29), max_steps=2, **saved))
    for data in (DATA, WeightedOrder(np.ones(29), 29).over(DATA)):
        with pytest.raises(ConfigError, match="order: "):
            train(job(mlp(), data, max_steps=4, resume="auto", **saved))


def test_an_audit_says_draws_where_samples_are_drawn(tmp_path: Path) -> None:
    train(job(mlp(), weighted(), epochs=2, run_dir=tmp_path / "run"), 2)
    found = audit(journal.iterate(tmp_path / "run" / "journal.jsonl"))
    assert (found.wrong, found.drawn, found.enumerated) == ((), True, False)
    lines = dict(summary_lines(found))
    assert lines["samples"] == "80 applied in epochs of 40 draws: a sample counts as often as it was drawn"
    assert lines["order"].startswith("WeightedOrder: 40 positions of 29 samples, drawn with replacement; ")
    train(job(mlp(), bucketed(), epochs=1, run_dir=tmp_path / "other"))
    found = audit(journal.iterate(tmp_path / "other" / "journal.jsonl"))
    assert (found.wrong, found.drawn) == ((), False)
    assert "each once by construction" in dict(summary_lines(found))["order"]


def test_an_audit_still_finds_a_draw_that_is_missing(tmp_path: Path) -> None:
    train(job(mlp(), weighted(), epochs=2, run_dir=tmp_path / "run"))
    lines = list(journal.iterate(tmp_path / "run" / "journal.jsonl"))
    without = [e for e in lines if not (isinstance(e, events.StepCommitted) and e.step == 2)]
    assert any("missing" in one for one in audit(without).wrong)
    assert any("in no step" in one for one in audit(without).wrong)


class SomeUnreadable(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> Any:
        if index == 3:
            raise SkippedSampleError(f"sample {index} is damaged")
        return DATA[0][index], DATA[1][index]


def test_a_sample_that_is_drawn_twice_and_cannot_be_read_is_left_out_twice(tmp_path: Path) -> None:
    weights = np.where(np.arange(29) == 3, 20.0, 1.0)
    data = WeightedOrder(weights, 24).over(SomeUnreadable())
    train(job(mlp(), data, epochs=1, run_dir=tmp_path / "run"), 2)
    found = audit(journal.iterate(tmp_path / "run" / "journal.jsonl"))
    assert found.wrong == ()
    assert found.samples < 20


def test_a_replayed_shard_names_the_samples_of_its_order(tmp_path: Path) -> None:
    given = job(mlp(), bucketed(), epochs=2, audit_every=1, run_dir=tmp_path / "run")
    train(given)
    record = journal_index.read(journal.iterate(tmp_path / "run" / "journal.jsonl"))
    again = replay_shard(given, tmp_path / "run", record, 4, 1)
    order = LengthBuckets(np.arange(29) * 7 % 11, pool=2).of_epoch(given.config.seed, 1, 12)
    assert again.strayed is None
    assert again.samples == tuple(order.take(2, 4).tolist())
    other = job(mlp(), DATA, epochs=2, audit_every=1)
    with pytest.raises(ConfigError, match="order: "):
        replay_shard(other, tmp_path / "run", record, 4, 1)


def test_validation_data_has_no_order() -> None:
    with pytest.raises(UsageError, match="has the order WeightedOrder"):
        train(job(mlp(), DATA, validation=weighted(), epochs=1))


def test_an_order_that_cannot_be_kept_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    config = TrainConfig(shuffle=False, run_dir=str(tmp_path / "run"), progress=False)
    trainer = Trainer(mlp(), torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), config=config)
    with pytest.raises(ConfigError, match=r"shuffle=False, and .* the order WeightedOrder") as caught:
        trainer.fit(weighted())
    assert not hasattr(caught.value, "__notes__")  # of a rank
    with pytest.raises(UsageError, match="the validation data is empty"):
        trainer.fit(DATA, tuple(part[:0] for part in DATA))
    for call in (trainer.evaluate, trainer.predict):
        with pytest.raises(UsageError, match="has the order LengthBuckets") as refused:
            call(bucketed())
        assert not hasattr(refused.value, "__notes__")
    assert not (tmp_path / "run").exists()
