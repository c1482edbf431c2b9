"""Samplers and pruners: every word, and objects of Optuna, which are used as they are."""

from __future__ import annotations

import importlib.util
import math

import optuna
import pytest
from tests.frontends.tuner.inline_trials import search

import paceline

SPACE = {"x": paceline.tune.uniform(-3, 3), "lr": paceline.tune.loguniform(1e-4, 1.0)}


def bowl(params) -> float:
    return float(params["x"] ** 2 + abs(math.log10(params["lr"]) + 2))


@pytest.mark.parametrize(
    "sampler",
    [
        "tpe",
        "random",
        "qmc",
        "gp",
        "cmaes",
        optuna.samplers.TPESampler(seed=5, n_startup_trials=4),
        optuna.samplers.NSGAIISampler(seed=5),
    ],
    ids=lambda sampler: sampler if isinstance(sampler, str) else type(sampler).__name__,
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_samplers(tmp_path, sampler):
    """More trials than each of them draws at random before it looks at results."""
    if sampler == "cmaes" and importlib.util.find_spec("cmaes") is None:
        pytest.skip("pip install cmaes")
    trials = search(tmp_path / "a", bowl, 12, space=SPACE, sampler=sampler)
    assert [trial.state for trial in trials] == ["complete"] * 12
    assert all(trial.value == bowl(trial.params) for trial in trials)
    assert len({tuple(trial.params.items()) for trial in trials}) == 12


@pytest.mark.parametrize(
    "pruner",
    [
        "asha",
        "median",
        "hyperband",
        optuna.pruners.PercentilePruner(25.0, n_startup_trials=2),
        optuna.pruners.ThresholdPruner(upper=3.0),
    ],
    ids=lambda pruner: pruner if isinstance(pruner, str) else type(pruner).__name__,
)
@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_pruners(tmp_path, pruner):
    trials = search(tmp_path / "a", bowl, 40, space=SPACE, sampler="random", pruner=pruner)
    states = {trial.state for trial in trials}
    assert states == {"complete", "pruned"}
    assert all(trial.value == bowl(trial.params) for trial in trials if trial.state == "complete")
