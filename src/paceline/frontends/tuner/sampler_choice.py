"""Samplers and pruners: by name with the seed, or any object of Optuna's as it is."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

from optuna import pruners, samplers
from optuna.exceptions import ExperimentalWarning
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.wording import with_article
from paceline.frontends.tuner.population import PopulationSampler, PopulationTraining
from paceline.frontends.tuner.search_space import SearchSpace

_SAMPLERS: Final[Mapping[str, Callable[[SearchSpace, int | None], BaseSampler]]] = {
    "tpe": lambda space, seed: samplers.TPESampler(seed=seed),
    "random": lambda space, seed: samplers.RandomSampler(seed=seed),
    "grid": lambda space, seed: samplers.GridSampler(_grid(space), seed=seed),
    "qmc": lambda space, seed: samplers.QMCSampler(seed=seed),
    "cmaes": lambda space, seed: samplers.CmaEsSampler(seed=seed),
    "gp": lambda space, seed: samplers.GPSampler(seed=seed),
}
_PRUNERS: Final[Mapping[str, Callable[[], BasePruner]]] = {
    # From the first step on: Optuna would else guess the first rung from the first trial that completes.
    "asha": lambda: pruners.SuccessiveHalvingPruner(min_resource=1),
    "median": pruners.MedianPruner,
    "hyperband": pruners.HyperbandPruner,
}
# Packages that Optuna imports at a later draw, in the middle of the search.
_PACKAGES: Final[Mapping[str, str]] = {"cmaes": "cmaes", "gp": "scipy", "qmc": "scipy"}
# What these draw does not depend on the results of other trials.
_WITHOUT_HISTORY: Final = (samplers.RandomSampler,)


def choose_sampler(given: object, space: SearchSpace, seed: int | None, mode: str) -> BaseSampler:
    """Return the sampler for what a user gave: None, a name, an object of Optuna's, PopulationTraining."""
    if isinstance(given, PopulationTraining):
        return PopulationSampler(given, space, seed, mode)
    if isinstance(given, BaseSampler):
        return given
    if given is None or isinstance(given, str):
        name = "tpe" if given is None else given.lower()
        if name in _SAMPLERS:
            return _made(name, space, seed)
    raise ConfigError(
        f"sampler is {given!r}" if isinstance(given, str) else f"sampler is {with_article(given)}",
        remedy=f"use one of {', '.join(_SAMPLERS)}, a sampler of Optuna, or paceline.tune.PopulationTraining",
        key="sampler",
    )


def _made(name: str, space: SearchSpace, seed: int | None) -> BaseSampler:
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise UnavailableError(
            f"the sampler {name!r} needs the package {package}, which is not installed",
            remedy=f"pip install {package}, or use another sampler",
        )
    with warnings.catch_warnings():
        # A caller that names one of these wants it; Optuna's API behind it is not what they write.
        warnings.simplefilter("ignore", ExperimentalWarning)
        return _SAMPLERS[name](space, seed)


def choose_pruner(given: object) -> BasePruner:
    """Return the pruner for what a user gave: None, a name, or an object of Optuna's."""
    if given is None:
        return pruners.NopPruner()
    if isinstance(given, BasePruner):
        return given
    if isinstance(given, str) and given.lower() in _PRUNERS:
        return _PRUNERS[given.lower()]()
    raise ConfigError(
        f"pruner is {given!r}" if isinstance(given, str) else f"pruner is {with_article(given)}",
        remedy=f"use one of {', '.join(_PRUNERS)}, a pruner of Optuna, or None",
        key="pruner",
    )


def prunes(pruner: BasePruner) -> bool:
    """Return whether a trial has to wait for an answer to each report."""
    return not isinstance(pruner, pruners.NopPruner)


def trials_needed(sampler: BaseSampler, slots: int, *, in_order: bool) -> Callable[[int], int]:
    """Return, for the number of a trial, how many of the first trials must be over before it is asked for:
    those whose results the sampler is shown."""
    if isinstance(sampler, PopulationSampler):
        return sampler.trials_needed
    if not in_order or isinstance(sampler, _WITHOUT_HISTORY):
        return lambda number: 0
    return lambda number: max(0, number - slots + 1)


def sees_only_first(sampler: BaseSampler, *, in_order: bool) -> bool:
    """Return whether the sampler is shown the results of those trials alone."""
    return isinstance(sampler, PopulationSampler) or (in_order and not isinstance(sampler, _WITHOUT_HISTORY))


def _grid(space: SearchSpace) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, IntDistribution

    grid: dict[str, Any] = {}
    for name, one in space.distributions.items():
        if isinstance(one, CategoricalDistribution):
            grid[name] = list(one.choices)
        elif isinstance(one, IntDistribution):
            grid[name] = list(range(one.low, one.high + 1, one.step))
        else:
            raise ConfigError(
                f"sampler 'grid' cannot list the values of {name}, which is a range of numbers",
                remedy=f"give {name} as a list of values, or use another sampler",
                key=name,
            )
    return grid


def most_trials(sampler: BaseSampler) -> int | None:
    """Return how many different trials a sampler has; None: there is no end of them."""
    if isinstance(sampler, samplers.GridSampler):
        return int(sampler._n_min_trials)
    return None
