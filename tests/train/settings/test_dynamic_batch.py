"""The noise of gradients: the estimator against synthetic gradients whose noise is known, and the growth."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from paceline.core.errors import UsageError
from paceline.train.settings.dynamic_batch import DynamicBatch, GradientNoise

DIMENSIONS = 200
# Never grows: for looking at the estimates alone.
STILL = 10**9


def observation(rng, counts, signal, sigma):
    """Square norms as a step would measure them: samples' gradients are `signal` plus normal noise."""
    means = [
        signal + rng.normal(0.0, sigma, (n, signal.size)).mean(axis=0) if n else 0.0 * signal for n in counts
    ]
    whole = sum(n * mean for n, mean in zip(counts, means, strict=True)) / sum(counts)
    return [float(mean @ mean) for mean in means], list(counts), float(whole @ whole)


@pytest.mark.parametrize(
    ("counts", "signal_norm", "sigma"),
    [
        ((8, 8, 8, 8), 1.0, 0.5),
        ((8, 8, 8, 8), 0.7, 0.5),
        ((16, 16), 2.0, 0.1),
        ((3, 5, 0, 7, 1), 1.0, 0.5),
    ],
    ids=["even", "mostly noise", "two shards", "uneven and one empty"],
)
def test_the_estimate_finds_the_noise_that_is_there(counts, signal_norm, sigma):
    rng = np.random.default_rng(0)
    signal = np.full(DIMENSIONS, signal_norm / math.sqrt(DIMENSIONS))
    noise = GradientNoise(DynamicBatch(sum(counts), STILL, 1e9, smoothing=0.999))
    for _ in range(1500):
        noise.observe(*observation(rng, counts, signal, sigma))
    true_scale = DIMENSIONS * sigma**2 / signal_norm**2
    assert noise.noise_scale == pytest.approx(true_scale, rel=0.05)
    assert noise.relative_variance == pytest.approx(true_scale / sum(counts), rel=0.05)


def test_each_estimate_is_unbiased_even_for_uneven_shards():
    """One observation each, averaged here and not by the smoothing: S and |G|^2 themselves."""
    rng = np.random.default_rng(1)
    signal = np.full(50, 0.1)
    noises, signals = [], []
    for _ in range(4000):
        one = GradientNoise(DynamicBatch(1, STILL, 1e9))
        one.observe(*observation(rng, (2, 5, 1), signal, 0.3))
        state = one.state_dict()
        noises.append(state["noise"] / state["weight"])
        signals.append(state["signal"] / state["weight"])
    assert np.mean(noises) == pytest.approx(50 * 0.3**2, rel=0.02)
    assert np.mean(signals) == pytest.approx(50 * 0.1**2, rel=0.1)


def test_the_batch_doubles_until_the_gradient_is_clean_enough():
    """S / |G|^2 is 64, and 64 / 128 is the first that is not above 0.7."""
    rng = np.random.default_rng(2)
    signal = np.full(DIMENSIONS, 1.0 / math.sqrt(DIMENSIONS))
    sigma = math.sqrt(64.0 / DIMENSIONS)
    noise = GradientNoise(DynamicBatch(16, 4096, 0.7, smoothing=0.98, hold=50))
    seen = [noise.batch]
    for _ in range(600):
        batch = noise.observe(*observation(rng, (noise.batch // 4,) * 4, signal, sigma))
        if batch != seen[-1]:
            seen.append(batch)
    assert seen == [16, 32, 64, 128]


def noisy(batch):
    """Two shards that point in opposite directions: nothing but noise."""
    return [1.0, 1.0], [batch // 2, batch - batch // 2], 0.0


def test_growth_waits_doubles_and_ends_at_max():
    noise = GradientNoise(DynamicBatch(10, 35, 1.0, hold=3))
    batches = [noise.observe(*noisy(noise.batch)) for _ in range(12)]
    assert batches == [10, 10, 20, 20, 20, 35, 35, 35, 35, 35, 35, 35]
    assert noise.noise_scale == math.inf


def test_equal_shards_have_no_noise_and_never_grow():
    noise = GradientNoise(DynamicBatch(8, 64, 1e-6, hold=1))
    assert [noise.observe([4.0, 4.0], [4, 4], 4.0) for _ in range(5)] == [8] * 5
    assert noise.relative_variance == 0.0


@pytest.mark.parametrize(
    "step",
    [
        ([math.nan, 1.0], [4, 4], 1.0),
        ([1.0, 1.0], [4, 4], math.inf),
        ([1.0, 0.0], [4, 0], 1.0),
        ([], [], 0.0),
    ],
    ids=["nan", "overflow", "one shard", "nothing"],
)
def test_what_says_nothing_about_noise_changes_nothing(step):
    noise = GradientNoise(DynamicBatch(8, 64, hold=1))
    before = noise.state_dict()
    assert noise.observe(*step) == 8
    assert noise.state_dict() == before
    assert math.isnan(noise.relative_variance)


def test_an_empty_shard_may_hold_anything():
    full, empty = (GradientNoise(DynamicBatch(8, 64, hold=1)) for _ in range(2))
    full.observe([2.0, 3.0], [4, 4], 1.0)
    empty.observe([2.0, math.nan, 3.0], [4, 0, 4], 1.0)
    assert full.state_dict() == empty.state_dict()


def test_state_goes_through_json_bit_for_bit():
    rng = np.random.default_rng(3)
    settings = DynamicBatch(8, 1024, 0.3, hold=2)
    signal = np.full(10, 0.3)
    steps = [observation(rng, (2, 2, 2, 2), signal, 0.7) for _ in range(40)]
    whole, first, second = (GradientNoise(settings) for _ in range(3))
    expected = [whole.observe(*step) for step in steps]
    found = [first.observe(*step) for step in steps[:17]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [second.observe(*step) for step in steps[17:]]
    assert found == expected
    assert second.state_dict() == whole.state_dict()


def test_bad_input_is_refused():
    noise = GradientNoise(DynamicBatch(8, 64))
    with pytest.raises(UsageError, match="2 square norms were given for 3 shards"):
        noise.observe([1.0, 1.0], [1, 1, 1], 1.0)
    with pytest.raises(UsageError, match="the saved global batch is 128, and dynamic_batch allows 8 to 64"):
        noise.load_state_dict({**noise.state_dict(), "batch": 128})
