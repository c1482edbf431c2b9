"""Search spaces: Paceline's own distributions, plain lists, Optuna's distributions and `ray.tune` objects,
all translated to what Optuna samples from.

A choice among values that JSON does not have (tuples, classes, functions) is sampled by the text of each
value; the value itself stays here and is what `train_fn` gets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from paceline.core.errors import ConfigError
from paceline.core.wording import listed, type_name

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_KNOWN = (
    "give paceline.tune.choice, uniform, loguniform or randint, a list of values, a distribution of Optuna, "
    "or an object of ray.tune"
)


@final
@dataclass(frozen=True)
class ValueChoice:
    """One of several values, each as likely as the others."""

    values: tuple[Any, ...]


@final
@dataclass(frozen=True)
class FloatRange:
    """A number from `low` to `high`; `log`: equal factors are equally likely."""

    low: float
    high: float
    log: bool = False


@final
@dataclass(frozen=True)
class IntRange:
    """A whole number from `low` up to, and without, `high`."""

    low: int
    high: int


def choice(values: Sequence[Any]) -> ValueChoice:
    """Search among these values."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ConfigError(
            f"choice was given {values!r}",
            remedy='give a list with at least one value: choice(["sgd", "adam"])',
        )
    return ValueChoice(tuple(values))


def uniform(low: float, high: float) -> FloatRange:
    """Search between two numbers."""
    return _float_range("uniform", low, high, log=False)


def loguniform(low: float, high: float) -> FloatRange:
    """Search between two numbers above 0, where equal factors are equally likely."""
    return _float_range("loguniform", low, high, log=True)


def randint(low: int, high: int) -> IntRange:
    """Search among whole numbers from `low` to `high - 1`, as NumPy and Ray Tune count."""
    if not _is_whole(low) or not _is_whole(high) or low >= high:
        raise ConfigError(
            f"randint({low!r}, {high!r}) holds no number",
            remedy="give two whole numbers, the second above the first, which is not drawn itself",
        )
    return IntRange(low, high)


def _float_range(name: str, low: object, high: object, *, log: bool) -> FloatRange:
    numbers = [
        value for value in (low, high) if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if len(numbers) < 2 or not all(map(math.isfinite, numbers)) or numbers[0] > numbers[1]:
        raise ConfigError(
            f"{name}({low!r}, {high!r}) is no range", remedy="give two numbers, the lower one first"
        )
    if log and numbers[0] <= 0:
        raise ConfigError(
            f"{name}({low!r}, {high!r}) begins at or below 0, where there are no factors",
            remedy=f"begin above 0: {name}(1e-5, 1e-1), or use uniform",
        )
    return FloatRange(float(numbers[0]), float(numbers[1]), log)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@final
@dataclass(frozen=True)
class ParameterDecoder:
    """Gives back the values that were sampled by their text; travels to trials."""

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __call__(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: self.values[name][value] if name in self.values else value for name, value in params.items()
        }


@final
@dataclass(frozen=True)
class SearchSpace:
    """A search space as Optuna samples it, and the way back to the user's values."""

    distributions: dict[str, BaseDistribution]
    decode: ParameterDecoder

    @classmethod
    def of(cls, space: object) -> SearchSpace:
        """Translate what a user wrote; ConfigError names the parameter that cannot be searched."""
        if not isinstance(space, Mapping):
            raise ConfigError(
                f"search_space is {type_name(type(space))}, not a dict",
                remedy='give a dict: {"lr": paceline.tune.loguniform(1e-4, 1e-1)}',
            )
        if not space:
            raise ConfigError("search_space is empty: there is nothing to search", remedy=_KNOWN)
        distributions: dict[str, BaseDistribution] = {}
        objects: dict[str, dict[str, Any]] = {}
        for name, one in space.items():
            if not isinstance(name, str) or not name:
                raise ConfigError(f"search_space has the key {name!r}", remedy="name parameters by text")
            distributions[name], by_text = _translate(name, one)
            if by_text:
                objects[name] = by_text
        return cls(distributions, ParameterDecoder(objects))

    def to_plain(self) -> dict[str, Any]:
        """Return the space as plain data: what a resumed study compares."""
        from optuna.distributions import distribution_to_json

        return {name: json.loads(distribution_to_json(one)) for name, one in self.distributions.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return how two plain search spaces differ, in words; empty where they do not."""
    words = []
    if gone := sorted(before.keys() - now.keys()):
        words.append(f"{listed(gone)} no longer searched")
    if new := sorted(now.keys() - before.keys()):
        words.append(f"{listed(new)} new")
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            words.append(f"{name} was {_shown(before[name])}, is {_shown(now[name])}")
    return "; ".join(words)


def _shown(plain: Mapping[str, Any]) -> str:
    attributes = ", ".join(f"{key}={value}" for key, value in plain["attributes"].items())
    return f"{str(plain['name']).removesuffix('Distribution')}({attributes})"


def _translate(name: str, one: object) -> tuple[BaseDistribution, dict[str, Any]]:
    from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

    if isinstance(one, BaseDistribution):
        return one, {}
    if isinstance(one, ValueChoice):
        return _categories(name, one.values)
    if isinstance(one, FloatRange):
        return FloatDistribution(one.low, one.high, log=one.log), {}
    if isinstance(one, IntRange):
        return IntDistribution(one.low, one.high - 1), {}
    if isinstance(one, list | tuple):
        return _categories(name, one)
    # As text, because Ray takes seconds to import and may not be installed.
    if type(one).__module__.startswith("ray.tune"):
        return _of_ray(name, one)
    if isinstance(one, Mapping) and set(one) == {"grid_search"}:
        return _categories(name, one["grid_search"])
    raise ConfigError(
        f"search_space[{name!r}] is {one!r}, which is no distribution",
        remedy=f"{_KNOWN}; a value that stays the same is a list of one: [{one!r}]",
        key=name,
    )


def _categories(name: str, values: Sequence[Any]) -> tuple[BaseDistribution, dict[str, Any]]:
    from optuna.distributions import CategoricalDistribution

    if not values:
        raise ConfigError(f"search_space[{name!r}] is a list without values", remedy="give at least one")
    if all(value is None or isinstance(value, bool | int | float | str) for value in values):
        return CategoricalDistribution(tuple(values)), {}
    by_text = {
        getattr(value, "__qualname__", repr(value)) if callable(value) else repr(value): value
        for value in values
    }
    if len(by_text) < len(values):
        raise ConfigError(
            f"search_space[{name!r}] has values that look alike: {listed(sorted(by_text))}",
            remedy="give values whose repr differs, or search their names and look them up in train_fn",
            key=name,
        )
    return CategoricalDistribution(tuple(by_text)), by_text


def _of_ray(name: str, domain: Any) -> tuple[BaseDistribution, dict[str, Any]]:
    """Translate a domain of ray.tune, known by the names of its class and of its sampler."""
    from optuna.distributions import FloatDistribution, IntDistribution

    sampler, step = domain.get_sampler(), None
    if type(sampler).__name__ == "Quantized":
        step, sampler = sampler.q, sampler.get_sampler()
    kind, how = type(domain).__name__, type(sampler).__name__
    log = how.lstrip("_") == "LogUniform"
    if kind == "Categorical":
        return _categories(name, list(domain.categories))
    if how.lstrip("_") in ("Uniform", "LogUniform"):
        # Optuna has no steps on a logarithmic scale; train_fn may round.
        if kind == "Float" and not (log and step):
            return FloatDistribution(domain.lower, domain.upper, log=log, step=step), {}
        if kind == "Integer" and not (log and step and step != 1):
            high = domain.upper if step and step != 1 else domain.upper - 1
            return IntDistribution(domain.lower, high, log=log, step=step or 1), {}
    raise ConfigError(
        f"search_space[{name!r}] is {kind} of ray.tune with the sampler {how}, which has no counterpart here",
        remedy="use tune.choice, uniform, quniform, loguniform, randint, qrandint or lograndint",
        key=name,
    )
