"""The learning rate as a function of step and batch, and how many steps a run has."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from paceline.core.errors import UsageError
from paceline.train.settings.run_length import RunLength
from paceline.train.settings.schedule import Schedule, steps_per_epoch, total_steps
from paceline.train.settings.train_config import DynamicBatch, TrainConfig


def factors(total, **settings):
    schedule = Schedule(TrainConfig(**settings), RunLength(total_steps=total))
    return [schedule.factor(step) for step in range(total)]


def test_the_shapes_step_by_step():
    assert factors(4) == [1.0] * 4
    assert factors(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert factors(4, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert factors(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(6, warmup_steps=2, schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert factors(4, schedule=lambda step: 2.0 * step, warmup_steps=2) == [0.0, 2.0, 4.0, 6.0]


@given(
    total=st.integers(2, 500),
    warmup=st.integers(0, 100),
    shape=st.sampled_from(["constant", "linear", "cosine"]),
)
def test_every_step_learns_and_none_more_than_was_asked_for(total, warmup, shape):
    values = factors(total, warmup_steps=min(warmup, total - 1), schedule=shape)
    assert all(0.0 < value <= 1.0 for value in values)
    after = values[min(warmup, total - 1) :]
    assert after == sorted(after, reverse=True)


def test_asking_beyond_the_end_stays_at_the_end():
    schedule = Schedule(TrainConfig(schedule="cosine"), RunLength(total_steps=10))
    assert schedule.factor(10) == schedule.factor(1000) == 0.0


@pytest.mark.parametrize(("rule", "expected"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rule_follows_the_batch(rule, expected):
    schedule = Schedule(TrainConfig(global_batch=32, lr_rule=rule), RunLength())
    assert schedule.factor(5) == schedule.factor(5, 32) == 1.0
    assert schedule.factor(5, 128) == expected
    assert schedule.factor(5, 8) == pytest.approx(1 / expected)


def test_rule_warmup_and_shape_multiply():
    schedule = Schedule(
        TrainConfig(global_batch=32, lr_rule="linear", warmup_steps=2, schedule="linear"),
        RunLength(total_steps=6),
    )
    assert schedule.factor(0, 64) == 0.5 * 1.0 * 2.0
    assert schedule.factor(4, 64) == 1.0 * 0.5 * 2.0


def test_under_a_dynamic_batch_the_learning_rate_is_meant_for_the_first_batch():
    config = TrainConfig(lr_rule="linear", shards=2, dynamic_batch=DynamicBatch(8, 64))
    schedule = Schedule(config, RunLength())
    assert [schedule.factor(0, batch) for batch in (8, 16, 64)] == [1.0, 2.0, 8.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.5, None, "1", True])
def test_a_function_that_returns_nonsense_is_named_with_the_step(bad):
    schedule = Schedule(TrainConfig(schedule=lambda step: bad), RunLength(total_steps=10))
    with pytest.raises(UsageError, match="for step 7"):
        schedule.factor(7)


def test_steps_of_an_epoch():
    assert steps_per_epoch(100, 32, drop_last=False) == 4
    assert steps_per_epoch(100, 32, drop_last=True) == 3
    assert steps_per_epoch(96, 32, drop_last=False) == steps_per_epoch(96, 32, drop_last=True) == 3


@pytest.mark.parametrize(
    ("settings", "samples", "expected"),
    [
        ({}, 100, 4),
        ({"epochs": 3}, 100, 12),
        ({"epochs": 3, "drop_last": True}, 100, 9),
        ({"max_steps": 7}, 100, 7),
        ({"epochs": 3, "max_steps": 7}, 100, 7),
        ({"epochs": 1, "max_steps": 7}, 100, 4),
        ({"epochs": 3}, None, None),
        ({"max_steps": 7}, None, 7),
        ({"epochs": 3, "max_steps": 7}, None, 7),
        ({"epochs": 3, "dynamic_batch": DynamicBatch(8, 64)}, 100, None),
        ({"max_steps": 7, "dynamic_batch": DynamicBatch(8, 64)}, 100, 7),
    ],
)
def test_steps_of_a_run(settings, samples, expected):
    assert total_steps(TrainConfig(global_batch=32, **settings), samples) == expected
