"""Autocast and the loss scale, the latter against torch's own scaler."""

from __future__ import annotations

import json
import random

import pytest
import torch

from paceline.core.errors import UsageError
from paceline.train.precision import LossScaler, autocast
from paceline.train.settings.train_config import LossScaling


def test_the_scale_follows_the_usual_rule():
    scaler = LossScaler(LossScaling(initial=1024.0, growth=2.0, backoff=0.5, growth_interval=3))
    scales = []
    for overflow in [False, False, False, False, True, False, False, True, True, False, False, False]:
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [1024, 1024, 2048, 2048, 1024, 1024, 1024, 512, 256, 256, 256, 512]
    assert scaler.good_steps == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_scale_is_that_of_torch(seed):
    """Torch keeps its scale in float32: powers of two are the same numbers there."""
    settings = LossScaling(initial=8.0, growth=4.0, backoff=0.25, growth_interval=4)
    ours = LossScaler(settings)
    scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
    chance = random.Random(seed)
    for _ in range(200):
        overflow = chance.random() < 0.15
        ours.update(overflow)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 4.0, 0.25, 4)
        assert (ours.scale, ours.good_steps) == (scale.item(), tracker.item())


def test_the_scale_never_leaves_float32():
    scaler = LossScaler(LossScaling(initial=2.0**126, growth_interval=1))
    for _ in range(5):
        scaler.update(False)
    assert scaler.scale == 2.0**127


def test_gradients_that_always_overflow_end_the_run_with_a_reason():
    scaler = LossScaler(LossScaling())

    def overflow_forever():
        for _ in range(100):
            scaler.update(True)

    with pytest.raises(UsageError, match="overflow even with a loss scale of"):
        overflow_forever()


def test_the_state_goes_through_json():
    scaler, again = (LossScaler(LossScaling(growth_interval=5)) for _ in range(2))
    for overflow in [True, False, False]:
        scaler.update(overflow)
    again.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert (again.scale, again.good_steps) == (32768.0, 2)
    with pytest.raises(UsageError, match="cannot be"):
        again.load_state_dict({"scale": -1.0, "good_steps": 0})


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_matrix_products_run_in_the_asked_precision_and_weights_stay_float32(precision, dtype):
    layer = torch.nn.Linear(4, 3)
    with autocast(precision, "cpu"):
        output = layer(torch.ones(2, 4))
    assert output.dtype == dtype
    output.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
