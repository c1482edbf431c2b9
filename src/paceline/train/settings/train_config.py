"""All settings of a training run as one frozen value, each field checked by itself when it is made.

What only shows when settings meet each other or the data is in `conflicts`. Reads and writes through
`paceline.core.config`; imports no torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, final, runtime_checkable

from paceline.core import config as core_config
from paceline.core.untrusted import redact_credentials
from paceline.train.settings.dynamic_batch import DynamicBatch as DynamicBatch
from paceline.train.settings.fault_tolerance import FaultTolerance as FaultTolerance
from paceline.train.settings.keyword_hints import explained
from paceline.train.settings.value_checks import (
    at_least,
    between,
    conform,
    not_empty,
    path_as_text,
    positive,
    refuse,
)

_AUDIT_EVERY = 100  # steps, where `audit` is on without a number
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# The settings that the weights are a function of, besides model, data and the machine's fingerprint.
_DEFINITION = (
    "shards",
    "global_batch",
    "seed",
    "mode",
    "precision",
    "loss_scaling",
    "micro_batch",
    "clip_norm",
    "lr_rule",
    "warmup_steps",
    "schedule",
    "dynamic_batch",
    "compile",
    "compression",
    "algorithm",
    "threads",
    "shuffle",
    "drop_last",
)


@runtime_checkable
class ScheduleFunction(Protocol):
    """A user-defined schedule: the step, counted from 0, to a factor of the learning rate."""

    def __call__(self, step: int, /) -> float: ...


@final
@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """Dynamic loss scaling of fp16: grow after `growth_interval` good steps, back off after an overflow."""

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        conform(self)
        positive(self, "initial", "the loss is multiplied by it")
        between(self, "growth", 1.0, float("inf"), "growing means multiplying by more than 1")
        between(self, "backoff", 0.0, 1.0, "backing off means multiplying by less than 1")
        at_least(self, "growth_interval", 1, "it counts the good steps before the scale grows")


@final
@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when `metric` has not become better by more than `min_delta` in `patience` evaluations."""

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        conform(self)
        _check_metric(self)
        at_least(self, "patience", 1, "it counts evaluations without improvement")
        if not 0.0 <= self.min_delta < float("inf"):
            message = f"min_delta={self.min_delta}: what an improvement must exceed is 0 or more"
            refuse(self, "min_delta", message, "set min_delta to 0 or a small positive number")


@final
@dataclass(frozen=True, kw_only=True)
class GradientCompression:
    """Compression of gradients before they travel; `keep` is the share that top-k sends."""

    kind: Literal["fp16", "bf16", "int8", "int4", "top-k"]
    keep: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        conform(self)
        if not 0.0 < self.keep <= 1.0:
            message = f"keep={self.keep}: it is the share of elements that is sent, above 0 and at most 1"
            refuse(self, "keep", message, "set keep=0.01 to send the largest 1 %")


@final
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings of checkpoints: when and where they are written, and which of them stay.

    `url` is any fsspec URL (default: the run's folder). `keep_best` is by `metric` and `mode`; `keep_every`
    keeps the first of that number of consecutive versions.
    """

    every_steps: int | None = None
    every_epochs: int | None = 1
    keep_last: int = 3
    keep_best: int = 1
    keep_every: int | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    url: str | None = None
    at_end: bool = True
    enabled: bool = True

    def __post_init__(self) -> None:
        path_as_text(self, "url")
        conform(self)
        at_least(self, "every_steps", 1, "it counts the steps between two checkpoints")
        at_least(self, "every_epochs", 1, "it counts the epochs between two checkpoints")
        at_least(self, "keep_last", 1, "the newest checkpoint is what a resumed run starts from")
        at_least(self, "keep_best", 0, "it counts the best checkpoints that stay")
        at_least(self, "keep_every", 1, "it counts versions")
        _check_metric(self)


@explained()
@final
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything about a run but the model, the objective, the optimizer and the data.

    `workers` decides how fast, never what comes out. Steps, batches and intervals are global. With `audit`
    all workers hash their weights every `audit_every` steps (100 where that is not set), and workers that
    differ are named.
    """

    workers: int = 1
    shards: int | None = None
    global_batch: int = 32
    epochs: int | None = None
    max_steps: int | None = None
    seed: int = 0
    mode: Literal["exact", "fast"] = "exact"

    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    loss_scaling: LossScaling = field(default_factory=LossScaling)
    micro_batch: int | Literal["auto"] | None = None
    clip_norm: float | None = None
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] | ScheduleFunction = "constant"
    dynamic_batch: DynamicBatch | None = None
    compression: GradientCompression | None = None
    algorithm: Literal["auto", "direct", "ring", "tree", "hierarchical"] = "auto"

    compile: bool = False
    activation_checkpointing: bool | tuple[str, ...] = False
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    shuffle: bool = True
    drop_last: bool = False

    evaluate_every: int | None = None
    log_every: int = 50
    early_stopping: EarlyStopping | None = None
    nonfinite: Literal["warn", "stop"] = "warn"
    audit: bool = False
    audit_every: int = 0
    progress: bool = True
    timeout: float | None = None

    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run_dir: str | None = None
    run_dir_access: Literal["owner", "group", "all"] = "owner"
    name: str = "train"
    resume: str | int | None = None

    def __post_init__(self) -> None:
        path_as_text(self, "run_dir")
        conform(self)
        at_least(self, "workers", 1, "a run needs a worker")
        at_least(self, "shards", 1, "a global batch is cut into this many slices")
        at_least(self, "global_batch", 1, "it counts the samples of one step")
        at_least(self, "epochs", 1, "it counts passes over the data")
        at_least(self, "max_steps", 1, "it counts steps")
        at_least(self, "seed", 0, "random keys are made of whole numbers that are not negative")
        if isinstance(self.micro_batch, int):
            at_least(self, "micro_batch", 1, "it counts the samples of one forward pass")
        at_least(self, "warmup_steps", 0, "it counts steps")
        at_least(self, "threads", 1, "it counts the threads of a worker")
        at_least(self, "evaluate_every", 1, "it counts the steps between two evaluations")
        at_least(self, "log_every", 1, "it counts the steps between two lines")
        at_least(self, "audit_every", 0, "it counts the steps between two hashes, and 0 is never")
        positive(self, "clip_norm", "gradients are scaled down to this norm")
        positive(self, "timeout", "it is how many seconds a worker waits for the others")
        if self.seed >= 1 << 63:
            message = f"seed={self.seed} needs {self.seed.bit_length()} bits, and a seed has 63"
            refuse(self, "seed", message, "take a smaller seed")
        _check_names(self)

    @property
    def micro_samples(self) -> int | None:
        """Samples of a forward pass, where that is limited; "auto" is found before the first step."""
        return self.micro_batch if isinstance(self.micro_batch, int) else None

    @property
    def first_batch(self) -> int:
        """Samples of the first step, which the optimizer's learning rate is meant for."""
        return self.global_batch if self.dynamic_batch is None else self.dynamic_batch.min

    def resolved(self, cores: int) -> TrainConfig:
        """Return the same run with what was left open filled in, for a machine of `cores` cores.

        One shard per worker, one epoch where no end is given, and `cores // shards` threads: all of these
        are part of the run's definition from then on, so none may depend on workers that come and go.
        """
        shards = self.workers if self.shards is None else self.shards
        return dataclasses.replace(
            self,
            shards=shards,
            audit_every=_AUDIT_EVERY if self.audit and not self.audit_every else self.audit_every,
            epochs=1 if self.epochs is None and self.max_steps is None else self.epochs,
            threads=max(1, cores // shards) if self.threads is None else self.threads,
        )


def definition(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that the weights are a function of, as plain JSON data, for a resolved config.

    Settings about speed, reporting and storage are not among them. The end of the run is, where the learning
    rate is a function of it.
    """
    names = list(_DEFINITION)
    if config.schedule in ("linear", "cosine"):
        names += ["epochs", "max_steps"]
    plain = {name: getattr(config, name) for name in names}
    for name, value in plain.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain[name] = dataclasses.asdict(value)
    return {**plain, "schedule": _schedule_text(config.schedule)}


def changes_of_definition(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what makes `after` another run than `before` (both from `definition`), as `name: old -> new`.

    A setting that an earlier version did not have yet was what is its default now.
    """
    defaults = {one.name: one.default for one in dataclasses.fields(TrainConfig)}
    names = [*before, *(name for name in after if name not in before)]
    pairs = [(name, before.get(name, defaults.get(name)), after.get(name)) for name in names]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def to_toml(config: TrainConfig) -> str:
    """Return TOML that `core.config.load(TrainConfig, ...)` reads back to an equal object.

    A schedule that is a function is written as its name, for people: loading it is refused, because a file
    cannot hold it.
    """
    if isinstance(config.schedule, str):
        return core_config.dumps(config)
    text = core_config.dumps(dataclasses.replace(config, schedule="constant"))
    return text.replace('schedule = "constant"\n', f'schedule = "{_schedule_text(config.schedule)}"\n', 1)


def recorded_toml(config: TrainConfig) -> str:
    """Return the settings as they are written to config.toml and into every checkpoint, which people publish:
    without user, password and keys in `checkpoint.url`. A run that resumes gets them from its script."""
    url = config.checkpoint.url
    if url is None or url == redact_credentials(url):
        return to_toml(config)
    place = dataclasses.replace(config.checkpoint, url=redact_credentials(url))
    return to_toml(dataclasses.replace(config, checkpoint=place))


def _schedule_text(schedule: object) -> str:
    if isinstance(schedule, str):
        return schedule
    kind = schedule if hasattr(schedule, "__qualname__") else type(schedule)
    name = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', 'unnamed')}"
    return f"only in code: function {name}"


def _check_names(config: TrainConfig) -> None:
    if not _FOLDER_NAME.fullmatch(config.name):
        remedy = "use letters, digits, dots, dashes and underscores, beginning with a letter or digit"
        refuse(config, "name", f"name={config.name!r} cannot be part of a folder's name", remedy)
    not_empty(config, "run_dir")
    not_empty(config, "resume")
    if isinstance(config.resume, bool) or (isinstance(config.resume, int) and config.resume < 0):
        remedy = 'use resume="auto", the number of a version, or a tag'
        refuse(config, "resume", f"resume={config.resume!r} is neither a version nor a tag", remedy)
    classes = config.activation_checkpointing
    if not isinstance(classes, bool) and not all(classes):
        message = f"activation_checkpointing={classes} has an empty class name"
        remedy = "name the module classes whose activations are recomputed"
        refuse(config, "activation_checkpointing", message, remedy)


def _check_metric(settings: EarlyStopping | CheckpointConfig) -> None:
    if not settings.metric:
        remedy = 'name it, such as metric="loss"'
        refuse(settings, "metric", "metric is empty text, which names nothing", remedy)
