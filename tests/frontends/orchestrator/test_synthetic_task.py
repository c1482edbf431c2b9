"""A model of the size that was asked for, and a task that can be learned."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError
from paceline.frontends.orchestrator.synthetic_task import make_model, make_task, shape_for


@pytest.mark.parametrize("size", [*range(64, 400, 7), 1_000, 5_000, 12_345, 100_000, 499_999, 1_000_000])
def test_the_model_has_about_so_many_parameters(size):
    shape = shape_for(size)
    module = make_model(shape)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == shape.parameters
    assert abs(count - size) <= 0.02 * size
    assert module(torch.zeros(2, shape.inputs)).shape == (2, 1)


@pytest.mark.parametrize("size", [10**7, 10**8, 10**9])
def test_large_sizes_too(size):
    assert abs(shape_for(size).parameters - size) <= 0.02 * size


def test_the_task_follows_from_the_seed_and_is_about_as_large_as_its_noise_allows():
    x, y = make_task(8, 20_000, seed=3)
    again, _ = make_task(8, 20_000, seed=3)
    other, _ = make_task(8, 20_000, seed=4)
    assert torch.equal(x, again)
    assert not torch.equal(x, other)
    assert abs(float(y.mean())) < 0.1
    assert 0.2 < float(y.var()) < 3.0
    quiet = make_task(8, 20_000, seed=3, noise=0.0)[1]
    assert 0.09 < float((y - quiet).std()) < 0.11


def test_a_hundred_thousand_samples_take_well_under_a_second():
    """Processor time: on a busy machine others' time is not ours."""
    started = time.thread_time()
    make_task(64, 100_000, seed=0)
    assert time.thread_time() - started < 1.0


def test_a_small_model_learns_it():
    x, y = make_task(8, 2_000, seed=0)
    torch.manual_seed(0)
    module = make_model(shape_for(2_000))
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]


def test_more_samples_than_memory_is_a_clear_error():
    with pytest.raises(ConfigError, match="there is no memory for"):
        make_task(64, 10**15, seed=0)
