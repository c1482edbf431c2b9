"""Turn histories into curves to draw, smoothed and thinned to what can be seen. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from paceline.core.wording import counted
from paceline.train.history import History

_POINTS = 600
_WINDOWS = 30


@final
@dataclass(frozen=True)
class Curve:
    """Points of one line, in the order of x; values that are not finite are gaps."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __bool__(self) -> bool:
        return any(math.isfinite(value) for value in self.y)


def step_losses(history: History) -> Curve:
    """Return the training loss of every step."""
    return Curve(
        tuple(float(record.step) for record in history.steps), tuple(record.loss for record in history.steps)
    )


def training_metric(history: History, metric: str) -> Curve:
    """Return a training metric per epoch, at the step where the epoch ended."""
    ends = epoch_ends(history)
    records = [record for record in history.epochs if metric == "loss" or metric in record.metrics]
    return Curve(
        tuple(float(ends[record.epoch]) for record in records),
        tuple(record.loss if metric == "loss" else record.metrics[metric] for record in records),
    )


def validation_metric(history: History, metric: str) -> Curve:
    """Return a validation metric, at the steps where it was measured."""
    found = [ev for ev in history.evaluations if metric in ev.metrics]
    return Curve(tuple(float(ev.step) for ev in found), tuple(ev.metrics[metric] for ev in found))


def metric_names(histories: Sequence[History]) -> list[str]:
    """Return every metric that some run has, the loss first."""
    names = {name for history in histories for record in history.epochs for name in record.metrics}
    names |= {name for history in histories for ev in history.evaluations for name in ev.metrics}
    return sorted(names | {"loss"}, key=lambda name: (name != "loss", name))


def epoch_ends(history: History) -> dict[int, int]:
    """Return the last step of each epoch; a resumed run begins where its records begin."""
    ends: dict[int, int] = {}
    for record in history.steps:
        ends[record.epoch] = record.step
    done = 0
    for epoch in history.epochs:
        done = ends.setdefault(epoch.epoch, done + epoch.steps)
    return ends


def smooth(curve: Curve) -> Curve:
    """Return a centred moving average over about a thirtieth of the curve."""
    half = len(curve.y) // _WINDOWS // 2
    if half == 0:
        return curve
    averaged = []
    for index in range(len(curve.y)):
        # Narrow at the beginning, where a loss falls fast and a lopsided window would hide it; as wide as
        # elsewhere at the end, where it is flat and a single step would show as a hook.
        window = [
            v for v in curve.y[index - min(half, index) : index + min(half, index) + 1] if math.isfinite(v)
        ]
        averaged.append(math.fsum(window) / len(window) if window else math.nan)
    return Curve(curve.x, tuple(averaged))


def thin(curve: Curve, points: int = _POINTS) -> Curve:
    """Keep about `points` points: the lowest and the highest of each stretch, so no spike is lost."""
    if len(curve.y) <= points:
        return curve
    stretch = math.ceil(2 * len(curve.y) / points)
    kept: list[int] = [0]
    for start in range(1, len(curve.y) - 1, stretch):
        indices = range(start, min(start + stretch, len(curve.y) - 1))
        finite = [index for index in indices if math.isfinite(curve.y[index])]
        if not finite:
            kept.append(indices[0])
            continue
        low = min(finite, key=lambda index: curve.y[index])
        high = max(finite, key=lambda index: curve.y[index])
        kept += sorted({low, high})
    kept.append(len(curve.y) - 1)
    return Curve(tuple(curve.x[index] for index in kept), tuple(curve.y[index] for index in kept))


def names_of(histories: Sequence[History], titles: Sequence[str] | None) -> list[str]:
    """Name each run: by its title, else by its workers, numbered where that is not enough."""
    if titles is not None:
        return list(titles)
    names = [counted(history.workers, "worker") for history in histories]
    return [
        f"{name} (run {index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)
    ]
