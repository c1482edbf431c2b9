"""Settings of the orchestrator, as a frozen value or as a dict; checked when it is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, final

from paceline.aggregate.async_sgd.staleness import Staleness
from paceline.core import type_conversion
from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import with_article
from paceline.frontends.own_words import in_words_of
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.keyword_hints import explained
from paceline.train.settings.value_checks import at_least, conform, path_as_text, positive
from paceline.train.step import aggregation_registry as aggregations
from paceline.train.step.aggregation_registry import Aggregation

_SMALLEST_MODEL = 64
_SUPERVISION = FaultTolerance()
# Answers to names of other libraries, and of TrainConfig.
_OTHER_NAMES = {
    "lr": "use learning_rate=...",
    "workers": "the orchestrator has them: DistributedTrainingOrchestrator(num_workers=...)",
    "num_workers": "the orchestrator has them: DistributedTrainingOrchestrator(num_workers=...)",
    "global_batch": "use batch_size=..., the samples of one worker: the global batch is workers x batch_size",
    "clip_norm": "use gradient_clip=...",
    "micro_batch": "use a smaller batch_size; each worker computes its samples in one pass",
    "max_steps": "use epochs=...; a run of the orchestrator has no limit by steps",
    "checkpoint": "use checkpoint_every_steps=..., or checkpoint_interval=..., which counts epochs",
    **dict.fromkeys(
        ("model", "dataset", "objective", "optimizer", "data", "train_data", "train_dataset"),
        "give it to the call: train_distributed(model=..., dataset=..., objective=..., optimizer=...)",
    ),
    **dict.fromkeys(
        ("weight_decay", "momentum", "betas"), "give train_distributed an optimizer=lambda p: ..."
    ),
    **dict.fromkeys(
        ("precision", "early_stopping", "evaluate_every", "schedule", "warmup_steps", "device"),
        "it is a setting of paceline.TrainConfig, for paceline.Trainer",
    ),
}
_OF_SUPERVISION = ("backoff", "stragglers", "bind", "port")


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


@explained(hints=_OTHER_NAMES)
@final
@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything about a training but the workers' number, the model and the data.

    model_size           parameters of the model that is built; not needed where a model is given
    batch_size           samples per worker and step: the global batch is workers x batch_size
    gradient_clip        the norm that a gradient is scaled down to; None: never
    checkpoint_interval  epochs between two checkpoints; None: none by epochs
    checkpoint_every_steps   steps between two checkpoints; set, it replaces checkpoint_interval
    aggregation_strategy an AggregationStrategy, its value, or a name of register_aggregation
    fault_tolerance      a worker that fails is replaced; else the first failure ends the job
    max_worker_failures  how often one worker is replaced before training continues without it
    backoff, stragglers  of `paceline.FaultTolerance`: waiting before a replacement, handling of slow workers
    bind, port           where the supervisor listens, so that `paceline join` reaches it from other machines
    exact                the sum of gradients does not depend on algorithm or number of workers
    shards               slices of the global batch; None: as `paceline.TrainConfig` chooses
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
    checkpoint_every_steps: int | None = None
    aggregation_strategy: AggregationStrategy | str = AggregationStrategy.ALL_REDUCE
    fault_tolerance: bool = True
    max_worker_failures: int = 3
    backoff: float = _SUPERVISION.backoff
    stragglers: Literal["wait", "rebalance", "replace", "backup"] = _SUPERVISION.stragglers
    bind: str = _SUPERVISION.bind
    port: int = _SUPERVISION.port
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
        at_least(self, "checkpoint_interval", 1, "it counts the epochs between two checkpoints")
        at_least(self, "checkpoint_every_steps", 1, "it counts the steps between two checkpoints")
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
    def supervised(self) -> bool:
        """Whether a supervisor starts and replaces the workers; ASYNC_SGD has its server for that."""
        return self.fault_tolerance and not self.asynchronous

    def supervision(self) -> FaultTolerance:
        """Return the settings of the supervisor."""
        return FaultTolerance(
            enabled=self.fault_tolerance,
            max_worker_failures=self.max_worker_failures,
            **{name: getattr(self, name) for name in _OF_SUPERVISION},
        )

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
    check_keys(given, ["size", *names], "the settings of the training", TrainingConfig)
    if "size" in given and "model_size" in given:
        raise ConfigError(
            "'size' and 'model_size' are the same setting, given twice", remedy="leave 'model_size' out"
        )
    return TrainingConfig(**{"model_size" if key == "size" else key: given[key] for key in given})


def check_keys(given: Mapping[Any, Any], known: Iterable[str], what: str, cls: type | None = None) -> None:
    """Refuse unknown keys; the error has the answer of the class to them, or the nearest and all valid
    ones."""
    valid = list(known)
    for key in given:
        if key in valid:
            continue
        remedy = type_conversion.unknown_key("", key, valid, cls).remedy
        raise ConfigError(f"{what} have no {key!r}", remedy=remedy, key=str(key))


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
    changed = [name for name in _OF_SUPERVISION if getattr(config, name) != getattr(_SUPERVISION, name)]
    if changed and not config.supervised:
        why = "ASYNC_SGD" if config.asynchronous else "fault_tolerance=False"
        raise ConfigError(
            f"{changed[0]}={getattr(config, changed[0])!r} with {why}: there is no supervisor that it is for",
            remedy=f"leave {' and '.join(changed)} out, or train synchronously with fault_tolerance=True",
            key=changed[0],
        )
    with in_words_of({"FaultTolerance": "TrainingConfig"}):
        config.supervision()  # refused here, before a worker starts
    if config.shards is not None and not config.sums_exactly:
        raise ConfigError(
            f"shards={config.shards}: only an exact sum is one over shards",
            remedy="leave shards out: there each worker is one slice",
            key="shards",
        )


def worker_count(name: str, value: object) -> int:
    """Return a number of workers, checked; `name` is that of the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"{name}={value!r} is not a whole number from 1", remedy=f"pass {name}=4")
    return value
