"""The number that a trial is judged by, from what its function returned and reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from paceline.core.errors import UsageError
from paceline.core.wording import listed, type_name


@final
class TrialResultError(UsageError):
    """A function that no search can judge, whatever the parameters: it ends the search."""


@final
class TrialSetupError(UsageError):
    """The trial cannot begin where it was sent: this says nothing about its parameters."""


@final
class TrialValueError(ValueError):
    """A value of this trial alone that cannot be compared, such as nan: the trial failed."""


def value_of(result: Any, metric: str | None, reports: Mapping[int, float]) -> float:
    """Return the trial's value: the metric of a dict, a number, or the last report."""
    if result is None:
        if not reports:
            raise TrialResultError(
                "train_fn returned None and reported nothing, so there is no value to search by",
                remedy="return a number or a dict, or call paceline.tune.report(step, value)",
            )
        value: Any = reports[max(reports)]
    elif isinstance(result, Mapping):
        value = _metric_of(result, metric)
    else:
        value = result
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text")
        number = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        what = "train_fn returned" if metric is None else f"train_fn returned as {metric!r}"
        raise TrialResultError(
            f"{what} {type_name(type(value))}, which is not one number",
            remedy="return a float, a tensor of one element, or a dict of them with metric=",
        ) from error
    if math.isnan(number):
        raise TrialValueError("the trial's value is nan")
    return number


def _metric_of(result: Mapping[Any, Any], metric: str | None) -> Any:
    names = listed([str(name) for name in result]) or "nothing"
    if metric is None:
        raise TrialResultError(
            f"train_fn returned a dict ({names}), and metric= does not say which of them counts",
            remedy=f"metric={str(next(iter(result), 'accuracy'))!r}",
        )
    if metric not in result:
        raise TrialResultError(
            f"train_fn returned no {metric!r}, only {names}",
            remedy="return it, or name another metric=",
        )
    return result[metric]
