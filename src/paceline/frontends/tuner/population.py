"""Population-based training, as a sampler: generation after generation, the worst of a population go on from
the checkpoints of the best, with parameters that are changed a little.

Trial `n` is member `n % size` of generation `n // size`. The first generation is drawn at random. A member of
a later one continues its own trial of the generation before; if that was among the worst, it continues one of
the best instead and changes its parameters: each is drawn anew with probability `resample`, else a number is
multiplied by one of `factors`, and a choice moves to a neighbour. A generation begins when the one before is
complete, and each draw is a function of the seed, the trial's number and the results of the generation
before: neither the number of slots nor a kill changes it.

`train_fn` finds the checkpoint to begin with by `paceline.tune.parent_folder()` and saves its own below
`paceline.tune.folder()`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

from paceline.core.errors import ConfigError
from paceline.frontends.tuner.population_settings import PopulationTraining as PopulationTraining
from paceline.frontends.tuner.search_space import SearchSpace
from paceline.frontends.tuner.tuning_study import PARENT


@final
@dataclass(frozen=True)
class _DrawnMember:
    parent: int | None
    params: Mapping[str, Any]


@final
class PopulationSampler(BaseSampler):
    """Draws the members of a population."""

    def __init__(self, settings: PopulationTraining, space: SearchSpace, seed: int | None, mode: str) -> None:
        self._settings = settings
        self._space = space.distributions
        self._seed = 0 if seed is None else seed
        self._sign = 1.0 if mode == "min" else -1.0
        for name, one in self._space.items():
            if not isinstance(one, CategoricalDistribution | FloatDistribution | IntDistribution):
                raise ConfigError(
                    f"{name} is {type(one).__name__}, which a population cannot change",
                    remedy="give a range of numbers or a list of values",
                )

    def trials_needed(self, number: int) -> int:
        """Return how many of the first trials must be over before this one is drawn."""
        return number // self._settings.size * self._settings.size

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        first = self.trials_needed(trial.number) - self._settings.size
        before = [
            one
            for one in study.get_trials(deepcopy=False)
            if first <= one.number < first + self._settings.size
        ]
        member = self._member(trial.number, before)
        if member.parent is not None:
            study._storage.set_trial_system_attr(trial._trial_id, PARENT, member.parent)
        return dict(member.params)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return _draw(param_distribution, self._generator(trial.number))

    def _generator(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, number])

    def _member(self, number: int, before: Sequence[FrozenTrial]) -> _DrawnMember:
        generator = self._generator(number)
        ranked = sorted((one for one in before if one.state is TrialState.COMPLETE), key=self._rank)
        if not ranked:
            return _DrawnMember(None, {name: _draw(one, generator) for name, one in self._space.items()})
        count = max(1, math.floor(len(before) * self._settings.quantile))
        best = ranked[:count]
        own = next(one for one in before if one.number == number - self._settings.size)
        # Fewer than two complete ones: nothing is both good and bad.
        worst = {one.number for one in ranked[max(count, len(ranked) - count) :]}
        if own.state is TrialState.COMPLETE and own.number not in worst:
            return _DrawnMember(own.number, own.params)
        parent = best[int(generator.integers(len(best)))]
        return _DrawnMember(
            parent.number,
            {name: self._changed(one, parent.params[name], generator) for name, one in self._space.items()},
        )

    def _rank(self, trial: FrozenTrial) -> tuple[float, int]:
        return self._sign * (trial.value or 0.0), trial.number

    def _changed(self, one: BaseDistribution, value: Any, generator: np.random.Generator) -> Any:
        if generator.random() < self._settings.resample:
            return _draw(one, generator)
        if isinstance(one, CategoricalDistribution):
            index = one.choices.index(value) + int(generator.choice([-1, 1]))
            return one.choices[min(max(index, 0), len(one.choices) - 1)]
        assert isinstance(one, FloatDistribution | IntDistribution)
        changed = min(max(value * float(generator.choice(self._settings.factors)), one.low), one.high)
        return _on_step(one, changed)


def _draw(one: BaseDistribution, generator: np.random.Generator) -> Any:
    if isinstance(one, CategoricalDistribution):
        return one.choices[int(generator.integers(len(one.choices)))]
    assert isinstance(one, FloatDistribution | IntDistribution)
    if one.log:
        drawn = math.exp(generator.uniform(math.log(one.low), math.log(one.high)))
    elif isinstance(one, IntDistribution):
        drawn = one.low + int(generator.integers((one.high - one.low) // one.step + 1)) * one.step
    else:
        drawn = float(generator.uniform(one.low, one.high))
    return _on_step(one, min(max(drawn, one.low), one.high))


def _on_step(one: FloatDistribution | IntDistribution, value: float) -> float | int:
    if one.step:
        # 0 + 3 * 0.1 is more than 0.3: Optuna would take it for out of range and draw another value.
        value = min(max(one.low + round((value - one.low) / one.step) * one.step, one.low), one.high)
    return int(value) if isinstance(one, IntDistribution) else float(value)
