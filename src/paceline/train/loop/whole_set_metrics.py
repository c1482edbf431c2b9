"""Metrics over a whole set (F1, AUC): functions of all outputs and targets, not means over batches.

Every rank keeps the outputs and targets of its batches. They are gathered on the first rank, put into the
order of the data and measured there, one batch after the other for an object with `update`, all at once for a
function; all ranks get the numbers. Which rank computed a batch is not seen, so the numbers are the same bits
on any number of workers. What it costs: the outputs of the whole set are in the memory of the first rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.data.containers import map_leaves, plain
from paceline.data.seeding import seed_everything
from paceline.train.objective import ObjectiveResult, split_pair
from paceline.train.settings.evaluation_config import EvaluationConfig, is_metric_object
from paceline.train.step.batch_feed import to_device
from paceline.train.team import Team

_MEASURING = 3  # marks keys of what metrics draw, apart from those of training and evaluation
_CPU = torch.device("cpu")

BatchOutputs = list[list[Any]]
"""Of each batch: its number in the order of the data, outputs, targets."""


@final
class WholeSetMetrics:
    """The metrics of an evaluation that need all samples."""

    def __init__(self, config: EvaluationConfig, seed: int) -> None:
        self._config, self._seed = config, seed

    def outputs(self, call: Callable[..., Any], batch: Any, scored: ObjectiveResult, count: int) -> list[Any]:
        """Return the outputs and targets of one batch of `count` samples, on the CPU."""
        config = self._config
        if config.outputs is not None:
            found = config.outputs(call, batch)
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise UsageError(
                    f"EvaluationConfig.outputs returned {with_article(found)}",
                    remedy="return (outputs, targets)",
                )
            outputs, targets = found
        elif scored.output is not None:
            outputs, targets = scored.output, split_pair(batch)[1]
        elif isinstance(batch, tuple | list) and len(batch) == 2:
            outputs, targets = call(batch[0]), batch[1]
        else:
            raise UsageError(
                f"metrics over the whole set need the outputs and targets of each batch, and this batch is "
                f"{with_article(batch)}",
                remedy="name them: "
                "EvaluationConfig(outputs=lambda model, batch: (model(batch['x']), batch['y']))",
            )
        for name, value in (("outputs", outputs), ("targets", targets)):
            _check_rows(value, count, name)
        # Copies: a batch may lie in memory that the next one is read into.
        return [
            map_leaves(to_device(one, _CPU), Tensor.clone, lambda leaf: leaf) for one in (outputs, targets)
        ]

    def measured(
        self, team: Team, rows: BatchOutputs, joined: Callable[[list[Any]], Any]
    ) -> dict[str, float]:
        """Return the metrics over the rows of all ranks, on every rank; a collective call."""
        gathered = team.context.gather([[number, plain(out), plain(aim)] for number, out, aim in rows])
        found: dict[str, float] = {}
        if gathered is not None:
            # The first rank's own are as the model gave them, and show what the others' have to become.
            everything = sorted([*rows, *(row for theirs in gathered[1:] for row in theirs)], key=_number)
            outputs, targets = ([row[place] for row in everything] for place in (1, 2))
            seed_everything(self._seed, 0, _MEASURING)
            for name, metric in self._config.metrics.items():
                try:
                    measured = self._measure(metric, outputs, targets, joined)
                except Exception as error:
                    error.add_note(f"in the metric {name!r}")
                    raise
                found |= _numbers(name, measured)
        return dict(team.context.broadcast(found if gathered is not None else None))

    @staticmethod
    def _measure(
        metric: Any, outputs: list[Any], targets: list[Any], joined: Callable[[list[Any]], Any]
    ) -> Any:
        if not is_metric_object(metric):
            return metric(joined(outputs), joined(targets))
        # A copy: what an object remembers belongs to one evaluation of one set.
        mine = copy.deepcopy(metric)
        for part in mine.modules() if isinstance(mine, nn.Module) else (mine,):
            if hasattr(part, "sync_on_compute"):
                part.sync_on_compute = False  # it has all samples; the other ranks take no part
        mine.reset()
        for output, target in zip(outputs, targets, strict=True):
            mine.update(output, target)
        return mine.compute()


def _number(row: list[Any]) -> int:
    return int(row[0])


def _check_rows(value: Any, count: int, what: str) -> None:
    tensors: list[Tensor] = []
    _collect(value, tensors)
    for tensor in tensors:
        if tensor.ndim == 0 or tensor.shape[0] != count:
            raise UsageError(
                f"the {what} of a batch of {count} are of shape {tuple(tensor.shape)}: metrics over the "
                "whole set need a row for each sample",
                remedy="return tensors whose first dimension is the batch from EvaluationConfig(outputs=...)",
            )


def _collect(value: Any, found: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for one in value.values():
            _collect(one, found)
    elif isinstance(value, tuple | list):
        for one in value:
            _collect(one, found)


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {k: v for key, one in value.items() for k, v in _numbers(f"{name}/{key}", one).items()}
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        return {name: float(value)}
    if isinstance(value, float | int):
        return {name: float(value)}
    shaped = isinstance(value, Tensor | np.ndarray)
    what = f"a value of shape {tuple(value.shape)}" if shaped else with_article(value)
    raise UsageError(
        f"the metric {name!r} gave {what}",
        remedy="return one number, or a dict of numbers by name; average=None returns one per class",
    )
