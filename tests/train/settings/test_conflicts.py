"""Combinations that cannot work are refused before a worker starts, and the message does the sum."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.train.settings.conflicts import check
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.train_config import (
    CheckpointConfig,
    DynamicBatch,
    EarlyStopping,
    GradientCompression,
    LossScaling,
    TrainConfig,
)

REFUSED = [
    (
        {"workers": 4, "shards": 3},
        100,
        r"workers=4 for shards=3: .* 4 - 3 = 1 of them would have nothing to do",
    ),
    (
        {"workers": 2, "fault_tolerance": FaultTolerance(min_workers=3)},
        100,
        "fault_tolerance.min_workers=3 for workers=2: the run would stop before it begins",
    ),
    (
        {"workers": 2, "fault_tolerance": FaultTolerance(max_workers=1)},
        100,
        "fault_tolerance.max_workers=1 for workers=2: the run would begin with more workers",
    ),
    (
        {"workers": 2, "shards": 4, "fault_tolerance": FaultTolerance(max_workers=5)},
        100,
        "fault_tolerance.max_workers=5 for shards=4: a shard is computed by one worker",
    ),
    ({"workers": 2, "shards": 4, "mode": "fast"}, 100, 'mode="fast" with workers=2 and shards=4'),
    ({"shards": 100_000, "global_batch": 200_000}, 10**6, "shards=100000 is more than 65536"),
    (
        {"shards": 8, "global_batch": 6},
        100,
        "global_batch=6 over shards=8: 2 of the 8 shards would never hold",
    ),
    ({"workers": 4, "global_batch": 3}, 100, "global_batch=3 over shards=4: 1 of the 4 shards"),
    ({}, 0, "0 samples"),
    ({"global_batch": 64, "drop_last": True}, 50, r"50 samples // global_batch=64 = 0 steps per epoch"),
    (
        {"dynamic_batch": DynamicBatch(8, 64), "shards": 2, "drop_last": True},
        50,
        r"50 samples // dynamic_batch.max=64 = 0",
    ),
    (
        {"global_batch": 10, "shards": 4, "micro_batch": 8},
        100,
        r"global_batch=10 over shards=4 with micro_batch=8: a shard holds 2 or 3 samples",
    ),
    ({"global_batch": 8, "shards": 4, "micro_batch": 3}, 100, "a shard holds 2 samples"),
    (
        {"shards": 4, "micro_batch": 20, "dynamic_batch": DynamicBatch(8, 64)},
        100,
        "dynamic_batch.max=64 over shards=4 with micro_batch=20: a shard holds 16 samples",
    ),
    ({"loss_scaling": LossScaling(initial=2.0)}, 100, 'precision="fp32": only fp16'),
    ({"shards": 1, "dynamic_batch": DynamicBatch(8, 64)}, 100, r"shards=1: .* divided by shards - 1 = 0"),
    (
        {"dynamic_batch": DynamicBatch(3, 64), "shards": 4},
        100,
        "dynamic_batch.min=3 over shards=4: a shard holds 0 or 1 sample, and",
    ),
    ({"dynamic_batch": DynamicBatch(200, 400), "shards": 4}, 100, "min=200 and 100 samples"),
    (
        {"dynamic_batch": DynamicBatch(8, 64), "shards": 4, "global_batch": 16},
        100,
        "global_batch=16 next to dynamic_batch: .* from dynamic_batch.min=8 to dynamic_batch.max=64",
    ),
    (
        {"dynamic_batch": DynamicBatch(8, 64), "workers": 2, "mode": "fast"},
        100,
        'dynamic_batch with mode="fast"',
    ),
    ({"schedule": "cosine", "epochs": 2}, None, "epochs=2 of an iterable dataset are an unknown number"),
    (
        {"schedule": "linear", "epochs": 3, "shards": 2, "dynamic_batch": DynamicBatch(10, 40)},
        100,
        "epochs=3 x 100 samples are 9 to 30 steps, because dynamic_batch grows from 10 to 40",
    ),
    (
        {"warmup_steps": 12, "epochs": 3, "global_batch": 32},
        100,
        r"warmup_steps=12 of 12 steps \(epochs=3 x 4 steps, 100 samples by global_batch=32\)",
    ),
    ({"warmup_steps": 9, "max_steps": 5}, None, "warmup_steps=9 of max_steps=5"),
    (
        {"compression": GradientCompression(kind="int8", keep=0.5)},
        100,
        "keep=0.5 with kind=.int8., which sends every",
    ),
    (
        {"compression": GradientCompression(kind="top-k", error_feedback=False)},
        100,
        r"1 - keep = 99.0% of every gradient would be lost",
    ),
    ({"mode": "fast", "compression": GradientCompression(kind="bf16")}, 100, "is kept by shard"),
    ({"global_batch": (1 << 24) + 1}, None, r"2\*\*24 = 16777216"),
    ({"checkpoint": CheckpointConfig(every_epochs=None, at_end=False)}, 100, "never write one"),
    ({"checkpoint": CheckpointConfig(enabled=False), "resume": "auto"}, 100, "no place to resume from"),
]


@pytest.mark.parametrize(("settings", "samples", "message"), REFUSED)
def test_refused_with_the_arithmetic(settings, samples, message):
    with pytest.raises(ConfigError, match=message) as raised:
        check(TrainConfig(**settings), samples=samples)
    assert raised.value.remedy


ALLOWED = [
    ({}, 1),
    ({}, None),
    ({"workers": 4, "global_batch": 10}, 3),
    ({"workers": 2, "shards": 8, "global_batch": 10, "micro_batch": 2, "epochs": 3}, 101),
    ({"shards": 4, "dynamic_batch": DynamicBatch(8, 64), "lr_rule": "linear"}, 1000),
    ({"shards": 4, "dynamic_batch": DynamicBatch(8, 64), "global_batch": 8}, 1000),
    ({"shards": 4, "dynamic_batch": DynamicBatch(8, 64), "schedule": "cosine", "max_steps": 50}, 1000),
    ({"schedule": "cosine", "max_steps": 10, "warmup_steps": 9}, None),
    ({"schedule": lambda step: 1.0, "epochs": 2}, None),
    ({"precision": "fp16", "loss_scaling": LossScaling(initial=8.0)}, 100),
    ({"compression": GradientCompression(kind="top-k")}, 100),
    ({"mode": "fast", "compression": GradientCompression(kind="bf16", error_feedback=False)}, 100),
    ({"lr_rule": "sqrt"}, 100),
    ({"checkpoint": CheckpointConfig(every_epochs=None)}, 100),
]


@pytest.mark.parametrize(("settings", "samples"), ALLOWED)
def test_allowed_before_and_after_it_is_resolved(settings, samples):
    config = TrainConfig(**settings)
    check(config, samples=samples)
    check(config.resolved(cores=8), samples=samples)


@pytest.mark.parametrize(("settings", "samples", "message"), REFUSED)
def test_what_is_refused_is_refused_once_resolved_too(settings, samples, message):
    with pytest.raises(ConfigError, match=message):
        check(TrainConfig(**settings).resolved(cores=8), samples=samples)


def test_early_stopping_needs_something_to_evaluate_on():
    config = TrainConfig(early_stopping=EarlyStopping(metric="accuracy", mode="max"))
    check(config, samples=100)
    with pytest.raises(ConfigError, match="watches 'accuracy' on validation data, and there is none"):
        check(config, samples=100, validation=False)
