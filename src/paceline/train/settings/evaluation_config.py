"""How a run evaluates: what `Trainer(evaluation=...)` is given beside the validation data of `fit`.

Holds functions, metric objects and data, so it is not part of TrainConfig, which a file can hold. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.train.settings.keyword_hints import OF_PARTS, explained
from paceline.train.settings.value_checks import at_least, refuse

_TAKEN = ("loss", "train_loss")  # what records and versions call the loss
_OBJECT = ("update", "compute", "reset")


@explained(hints=OF_PARTS)
@final
@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """An evaluation that is not simply the training objective on the data of `fit`.

    objective   instead of the one of training: its loss and metrics are means over the samples
    metrics     by name, over the whole set: a function (outputs, targets) of all samples in the order of the
                data -> a number, or an object with update, compute and reset (as of torchmetrics)
    outputs     a function (model, batch) -> (outputs, targets) for these metrics; by default the output for
                the input of a pair, and the pair's target
    sets        more validation data by name; its metrics are called "name/metric", those of the data that
                `fit` is given just "metric" (without such data: the first set has both)
    batch_size  samples of a forward pass; by default as many as training has
    """

    objective: Callable[..., Any] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    outputs: Callable[[Any, Any], Any] | None = None
    sets: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int | None = None

    def __post_init__(self) -> None:
        size = self.batch_size
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            message = f"batch_size is {with_article(size)}"
            refuse(self, "batch_size", message, "give the number of samples of a forward pass")
        at_least(self, "batch_size", 1, "it counts the samples of a forward pass")
        for name, what in (("metrics", "functions or metric objects"), ("sets", "data")):
            value = getattr(self, name)
            # A collection of torchmetrics has the methods of a dict and is none.
            if not isinstance(value, Mapping):
                message = f"{name} is {with_article(value)}"
                refuse(self, name, message, f"give a dict of {what} by name: {name}={{'name': ...}}")
            for key in value:
                self._check_name(name, key)
        for name, function in (("objective", self.objective), ("outputs", self.outputs)):
            if function is not None and not callable(function):
                refuse(
                    self, name, f"{name} is {with_article(function)}", f"give a function, or leave {name} out"
                )
        for name, metric in self.metrics.items():
            if isinstance(metric, type) or not (callable(metric) or is_metric_object(metric)):
                what = "the class itself" if isinstance(metric, type) else with_article(metric)
                raise UsageError(
                    f"the metric {name!r} is {what}",
                    remedy="give a function (outputs, targets) -> number, or an object with the methods "
                    f"{', '.join(_OBJECT)}",
                )
        if self.outputs is not None and not self.metrics:
            refuse(self, "outputs", "outputs are given and no metrics", "give metrics, or leave outputs out")

    def _check_name(self, setting: str, name: object) -> None:
        if not isinstance(name, str) or not name or "/" in name:
            remedy = 'use text without "/", which stands between the name of a set and that of a metric'
            refuse(self, setting, f"{setting} has the name {name!r}", remedy)
        if setting == "metrics" and name in _TAKEN:
            remedy = f'give it a name of its own, such as "{name}_of_set"'
            refuse(self, setting, f"the metric {name!r} has the name of the loss itself", remedy)


def is_metric_object(metric: object) -> bool:
    """Return whether a metric collects batches by itself."""
    return all(callable(getattr(metric, method, None)) for method in _OBJECT)
