"""Settings of the orchestrator, as a frozen value or as a dict; checked when it is made."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, final

from paceline.aggregate.async_sgd.staleness import Staleness
from paceline.core.errors import ConfigError
from paceline.core.wording import with_article
from paceline.train.settings.value_checks import at_least, conform, path_as_text, positive
from paceline.train.step import aggregation_registry as aggregations
from paceline.train.step.aggregation_registry import Aggregation

_SMALLEST_MODEL = 64


class AggregationStrategy(Enum):
    """Strategy by which the workers' gradients become one.

    ALL_REDUCE, RING_ALL_REDUCE and HIERARCHICAL are synchronous; with `exact` they give the same bits.
    In ASYNC_SGD workers never wait for each other. `register_aggregation` adds user-defined ones.
    """

    ALL_REDUCE = "all_reduce"
    RING_ALL_REDUCE = "ring_all_reduce"
    HIERARCHICAL = "hierarchical"
    ASYNC_SGD = "async_sgd"


# Names of the communication layer, for sums that need not be exact; "auto" for all others.
ALGORITHMS: Mapping[AggregationStrategy | str, Literal["ring", "hierarchical"]] = {
    AggregationStrategy.RING_ALL_REDUCE: "ring",
    AggregationStrategy.HIERARCHICAL: "hierarchical",
}


def register_aggregation(name: str, aggregation: Aggregation) -> None:
    """Register a user-defined way of combining gradients, for `aggregation_strategy=name`."""
    aggregations.register(name, aggregation, builtin=frozenset(one.value for one in AggregationStrategy))


@final
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything about a training but the workers' number, the model and the data.

    model_size           parameters of the model that is built; not needed where a model is given
    batch_size           samples per worker and step: the global batch is workers x batch_size
    gradient_clip        the norm that a gradient is scaled down to; None: never
    checkpoint_interval  steps between two checkpoints; None: only at the end
    aggregation_strategy an AggregationStrategy, its value, or a name of register_aggregation
    fault_tolerance      a worker that fails is replaced; else the first failure ends the job
    max_worker_failures  how often one worker is replaced before training continues without it
    exact                the sum of gradients does not depend on algorithm or number of workers
    shards               slices of the global batch; None: one per worker
    staleness            what ASYNC_SGD does with old gradients
    worker_timeout       seconds that a worker of ASYNC_SGD may take for one range before it counts as hung
    resume               continue the run in run_dir if there is one
    """

    batch_size: int = 32
    learning_rate: float = 1e-3
    epochs: int = 1
    model_size: int | None = None
    gradient_clip: float | None = 1.0
    checkpoint_interval: int | None = 100
    aggregation_strategy: AggregationStrategy | str = AggregationStrategy.ALL_REDUCE
    fault_tolerance: bool = True
    max_worker_failures: int = 3
    exact: bool = True
    seed: int = 0
    shards: int | None = None
    threads: int | None = None
    staleness: Staleness = field(default_factory=Staleness)
    worker_timeout: float = 60.0
    run_dir: str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        path_as_text(self, "run_dir")
        object.__setattr__(self, "aggregation_strategy", _strategy(self.aggregation_strategy))
        if not isinstance(self.staleness, Staleness):
            raise ConfigError(
                f"TrainingConfig: staleness is {with_article(self.staleness)}",
                remedy="give Staleness(weight=..., limit=..., beyond=...)",
                key="staleness",
            )
        conform(self)
        at_least(self, "model_size", _SMALLEST_MODEL, "a smaller one has nothing to learn with")
        at_least(self, "batch_size", 1, "it counts the samples of one worker's step")
        at_least(self, "epochs", 1, "it counts passes over the data")
        at_least(self, "checkpoint_interval", 1, "it counts the steps between two checkpoints")
        at_least(self, "max_worker_failures", 0, "it counts replacements of one worker")
        at_least(self, "seed", 0, "random keys are made of whole numbers that are not negative")
        at_least(self, "shards", 1, "a global batch is cut into this many slices")
        at_least(self, "threads", 1, "it counts the threads of a worker")
        positive(self, "learning_rate", "it multiplies every step")
        positive(self, "worker_timeout", "it is how long a worker may be silent")
        positive(self, "gradient_clip", "gradients are scaled down to this norm")
        _check_together(self)

    @property
    def asynchronous(self) -> bool:
        return self.aggregation_strategy is AggregationStrategy.ASYNC_SGD

    @property
    def own_aggregation(self) -> Aggregation | None:
        """The aggregation that the user registered under the strategy's name, if it is one."""
        name = self.aggregation_strategy
        return aggregations.find(name) if isinstance(name, str) else None

    @property
    def sums_exactly(self) -> bool:
        """Whether gradients are summed in the canonical order: the same bits on any number of workers."""
        return self.exact and not self.asynchronous and self.own_aggregation is None

    @property
    def strategy_name(self) -> str:
        chosen = self.aggregation_strategy
        return chosen if isinstance(chosen, str) else chosen.value


def read_config(given: TrainingConfig | Mapping[str, Any] | None) -> TrainingConfig:
    """Return a TrainingConfig from one, or from a dict such as {"size": ..., "batch_size": ...}."""
    if isinstance(given, TrainingConfig):
        return given
    if given is None:
        return TrainingConfig()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"the settings of the training are {with_article(given)}",
            remedy='give a dict such as {"size": 1_000_000, "batch_size": 32}, or a TrainingConfig',
        )
    names = [one.name for one in dataclasses.fields(TrainingConfig)]
    check_keys(given, ["size", *names], "the settings of the training")
    if "size" in given and "model_size" in given:
        raise ConfigError(
            "'size' and 'model_size' are the same setting, given twice", remedy="leave 'model_size' out"
        )
    return TrainingConfig(**{"model_size" if key == "size" else key: given[key] for key in given})


def check_keys(given: Mapping[Any, Any], known: Iterable[str], what: str) -> None:
    """Refuse unknown keys; the error names the nearest and all valid ones."""
    valid = list(known)
    for key in given:
        if key in valid:
            continue
        near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.6)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{what} have no {key!r}", remedy=f"{meant}the known keys are {', '.join(valid)}", key=str(key)
        )


def _strategy(given: object) -> AggregationStrategy | str:
    if isinstance(given, AggregationStrategy):
        return given
    own = aggregations.registered()
    values = [one.value for one in AggregationStrategy]
    if isinstance(given, str):
        if given.lower() in values:
            return AggregationStrategy(given.lower())
        if given in own:
            return given
    raise ConfigError(
        f"TrainingConfig: aggregation_strategy={given!r} is no strategy",
        remedy=f"use one of {', '.join([*values, *own])}, or register_aggregation(name, ...) before",
        key="aggregation_strategy",
    )


def _check_together(config: TrainingConfig) -> None:
    if config.staleness != Staleness() and not config.asynchronous:
        raise ConfigError(
            f"staleness is set, and aggregation_strategy is {config.strategy_name}: only ASYNC_SGD has old "
            "gradients",
            remedy="leave staleness out, or use AggregationStrategy.ASYNC_SGD",
            key="staleness",
        )
    if config.shards is not None and not config.sums_exactly:
        raise ConfigError(
            f"shards={config.shards}: only an exact sum is one over shards",
            remedy="leave shards out: there each worker is one slice",
            key="shards",
        )
