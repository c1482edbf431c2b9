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
from paceline.core.engine_registry import EngineSettings
from paceline.core.untrusted import redact_credentials
from paceline.train.settings.dynamic_batch import DynamicBatch as DynamicBatch
from paceline.train.settings.engine_choice import chosen_engine, in_a_comment, workers_of
from paceline.train.settings.fault_tolerance import FaultTolerance as FaultTolerance
from paceline.train.settings.keyword_hints import OF_CHECKPOINTS, OF_PARTS, explained
from paceline.train.settings.run_length import asked_for
from paceline.train.settings.value_checks import (
    at_least,
    between,
    conform,
    not_empty,
    path_as_text,
    positive,
    refuse,
)

_WORKERS_WITH_EQUAL_BITS = 4  # up to these many, the number of workers does not change a run's defaults
_COMFORTABLE_SAMPLES = 8  # of a shard that was not asked for
_AUDIT_EVERY = 100  # steps, where `audit` is on without a number
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

# The settings that the weights are a function of, besides model, data and the machine's fingerprint.
_DEFINITION = (
    "shards", "global_batch", "seed", "mode", "precision", "loss_scaling", "micro_batch", "clip_norm",
    "lr_rule", "optimizer_turns", "warmup_steps", "schedule", "scheduler_interval", "scheduler_metric",
    "dynamic_batch", "compile", "compression", "algorithm", "threads", "shuffle", "drop_last",
    "limit_batches", "unfreeze",
)  # fmt: skip


@runtime_checkable
class ScheduleFunction(Protocol):
    """A user-defined schedule: the step, counted from 0, to a factor of the learning rate. It may have other
    parameters (run_length.py): steps_per_epoch, total_steps and epochs, which it is given by name."""

    def __call__(self, step: int, /, *more: Any, **length: Any) -> float: ...


@explained(hints=OF_PARTS)
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


@explained(hints=OF_CHECKPOINTS)
@final
@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """Stop when `metric` has not become better by more than `min_delta` in `patience` evaluations.

    `restore_best`: at the end of the run, early or not, the model gets the weights of the evaluation that was
    the best by this rule.
    """

    metric: str = "loss"
    patience: int = 3
    min_delta: float = 0.0
    mode: Literal["min", "max"] = "min"
    restore_best: bool = True

    def __post_init__(self) -> None:
        conform(self)
        _check_metric(self)
        at_least(self, "patience", 1, "it counts evaluations without improvement")
        if not 0.0 <= self.min_delta < float("inf"):
            message = f"min_delta={self.min_delta}: what an improvement must exceed is 0 or more"
            refuse(self, "min_delta", message, "set min_delta to 0 or a small positive number")


@explained(hints=OF_PARTS)
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


@explained(hints=OF_CHECKPOINTS)
@final
@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings of checkpoints: when and where they are written, and which of them stay.

    `every_epochs="auto"` is after every epoch, but not within `least_seconds` of the version before, unless
    the epoch is the last one or has the best evaluation so far; never where `every_steps` is set. `url` is
    any fsspec URL (default: the run's folder). `keep_best` is by `metric` and `mode`; `keep_every` keeps the
    first of that number of consecutive versions.
    """

    every_steps: int | None = None
    every_epochs: int | Literal["auto"] | None = "auto"
    least_seconds: float = 10.0
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
        if self.every_epochs != "auto":
            at_least(self, "every_epochs", 1, "it counts the epochs between two checkpoints")
        if not 0.0 <= self.least_seconds < float("inf"):
            message = f"least_seconds={self.least_seconds}: the time between two versions is 0 or more"
            refuse(self, "least_seconds", message, "set least_seconds to 0 for a version after every epoch")
        at_least(self, "keep_last", 1, "the newest checkpoint is what a resumed run starts from")
        at_least(self, "keep_best", 0, "it counts the best checkpoints that stay")
        at_least(self, "keep_every", 1, "it counts versions")
        _check_metric(self)

    @property
    def epochs_between(self) -> int | None:
        """Epochs between two versions; None where epochs do not matter."""
        if self.every_epochs != "auto":
            return self.every_epochs
        return 1 if self.every_steps is None else None


@explained()
@final
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything about a run but the model, the objective, the optimizer and the data.

    `workers` decides how fast, never what comes out. Steps, batches and intervals are global. With `audit`
    all workers hash their weights every `audit_every` steps (100 where that is not set), and workers that
    differ are named. With `profile` each worker writes a trace of `profile_steps` steps to that folder.
    `run_dir=False`: the run keeps nothing; its folder is a temporary one that is deleted. `engine`: where
    the workers run, such as `paceline.Ssh(...)`, by itself or as its name or table; None: on this machine.
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
    optimizer_turns: tuple[int, ...] | None = None
    lr_rule: Literal["none", "linear", "sqrt"] = "none"
    warmup_steps: int = 0
    schedule: Literal["constant", "linear", "cosine"] | ScheduleFunction = "constant"
    scheduler_interval: Literal["epoch", "step"] = "epoch"
    scheduler_metric: str = "loss"
    dynamic_batch: DynamicBatch | None = None
    compression: GradientCompression | None = None
    algorithm: Literal["auto", "direct", "ring", "tree", "hierarchical"] = "auto"

    unfreeze: dict[str, int] = field(default_factory=dict, hash=False)
    compile: bool = False
    activation_checkpointing: bool | tuple[str, ...] = False
    threads: int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    shuffle: bool = True
    drop_last: bool = False
    limit_batches: int | None = None
    limit_validation: int | None = None
    dry_run: bool = False

    evaluate_every: int | None = None
    log_every: int = 50
    early_stopping: EarlyStopping | None = None
    log_grad_norm: bool | int = False
    nonfinite: Literal["warn", "stop", "skip"] = "warn"
    audit: bool = False
    audit_every: int = 0
    profile: str | None = None
    profile_steps: int = 3
    progress: bool = True
    timeout: float | None = None

    engine: EngineSettings | dict[str, Any] | str | None = None
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run_dir: str | Literal[False] | None = None
    run_dir_access: Literal["owner", "group", "all"] = "owner"
    name: str = "train"
    resume: str | int | None = None

    def __post_init__(self) -> None:
        path_as_text(self, "run_dir")
        path_as_text(self, "profile")
        _check_schedule(self)
        care = self.fault_tolerance
        engine = chosen_engine(self, self.engine, workers=self.workers, supervised=care.enabled)
        object.__setattr__(self, "engine", engine)
        if isinstance(engine, EngineSettings):
            object.__setattr__(self, "workers", workers_of(engine))
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
        if self.optimizer_turns is not None and min(self.optimizer_turns, default=0) < 1:
            message = f"optimizer_turns={self.optimizer_turns}: a turn is one step or more in a row"
            refuse(self, "optimizer_turns", message, "give one number from 1 up for each optimizer")
        at_least(self, "evaluate_every", 1, "it counts the steps between two evaluations")
        at_least(self, "limit_batches", 1, "it counts the steps of an epoch")
        at_least(self, "limit_validation", 1, "it counts global batches of validation data")
        at_least(self, "log_every", 1, "it counts the steps between two lines")
        at_least(self, "log_grad_norm", 0, "it counts the steps between two measurements")
        at_least(self, "audit_every", 0, "it counts the steps between two hashes, and 0 is never")
        at_least(self, "profile_steps", 1, "it counts the steps that are recorded")
        positive(self, "clip_norm", "gradients are scaled down to this norm")
        positive(self, "timeout", "it is how many seconds a worker waits for the others")
        if self.seed >= 1 << 63:
            message = f"seed={self.seed} needs {self.seed.bit_length()} bits, and a seed has 63"
            refuse(self, "seed", message, "take a smaller seed")
        _check_names(self)
        _check_unfreeze(self)

    @property
    def micro_samples(self) -> int | None:
        """Samples of a forward pass, where that is limited; "auto" is found before the first step."""
        return self.micro_batch if isinstance(self.micro_batch, int) else None

    @property
    def first_batch(self) -> int:
        """Samples of the first step, which the optimizer's learning rate is meant for."""
        return self.global_batch if self.dynamic_batch is None else self.dynamic_batch.min

    @property
    def chosen_shards(self) -> int:
        """Shards of a global batch: those that are set, else a number with which a run can grow."""
        return default_shards(self) if self.shards is None else self.shards

    def resolved(self, cores: int) -> TrainConfig:
        """Return the same run with what was left open filled in, for a machine of `cores` cores.

        The shards of `default_shards`, one epoch where no end is given, and threads that fill the cores when
        each shard has a worker (where the shards are the default: with 4 workers or more). All of these are
        part of the run's definition from then on, so none may depend on workers that come and go.
        """
        shards = self.chosen_shards
        sharing = shards if self.shards is not None else max(_WORKERS_WITH_EQUAL_BITS, most_workers(self))
        return dataclasses.replace(
            self,
            shards=shards,
            audit_every=_AUDIT_EVERY if self.audit and not self.audit_every else self.audit_every,
            epochs=1 if self.epochs is None and self.max_steps is None else self.epochs,
            threads=max(1, cores // sharing) if self.threads is None else self.threads,
        )


def default_shards(config: TrainConfig) -> int:
    """Return the shards of a run that sets none: twice the workers and at least 8, rounded up to a power of
    2, as long as a shard has 8 samples; but never fewer than 4.

    So 1, 2 and 4 workers give the same bits, and a run can grow. Smaller slices cost more for each sample,
    and BatchNorm sees a slice at a time. A shard is at least one sample and, where a micro-batch is set, one
    whole micro-batch; in fast mode a shard is a worker.
    """
    if config.mode == "fast":
        return config.workers
    workers = most_workers(config)
    wanted = 1 << (2 * max(workers, _WORKERS_WITH_EQUAL_BITS) - 1).bit_length()
    comfortable = max(_WORKERS_WITH_EQUAL_BITS, config.first_batch // _COMFORTABLE_SAMPLES)
    most = config.first_batch // (config.micro_samples or 1)
    return max(workers, min(wanted, comfortable, most))


def most_workers(config: TrainConfig) -> int:
    """Return the workers that the run is made for: those of its first start, or those it is to grow to."""
    return max(config.workers, config.fault_tolerance.max_workers or 0)


def shards_on_ranks(config: TrainConfig, ranks: int) -> int | None:
    """Return the shards of the run that the settings describe, for a job of that many ranks: fewer ranks than
    its workers do not make it another run. In fast mode they are the ranks, and None is returned."""
    if config.shards is not None or config.mode == "fast":
        return config.shards
    return default_shards(dataclasses.replace(config, workers=max(config.workers, ranks)))


def definition(config: TrainConfig, order: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that the weights are a function of, as plain JSON data, for a resolved config.

    Settings about speed, reporting and storage are not among them. The end of the run is, where the learning
    rate is a function of it. `order`: of the data, where it has one of its own (data/orders.py).
    """
    names = list(_DEFINITION)
    if config.schedule in ("linear", "cosine") or (
        not isinstance(config.schedule, str) and asked_for(config.schedule, "schedule")
    ):
        names += ["epochs", "max_steps"]
    if config.nonfinite == "skip":
        names.append("nonfinite")  # the two others change no weight
    plain = {name: getattr(config, name) for name in names}
    for name, value in plain.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain[name] = dataclasses.asdict(value)
        elif isinstance(value, tuple):
            plain[name] = list(value)  # as JSON has it
    plain["schedule"] = _schedule_text(config.schedule)
    return plain if order is None else {**plain, "order": dict(order)}


def changes_of_definition(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what makes `after` another run than `before` (both from `definition`), as `name: old -> new`.

    A setting that an earlier version did not have yet was what is its default now.
    """
    defaults = vars(TrainConfig())
    names = [*before, *(name for name in after if name not in before)]
    pairs = [(name, *(one.get(name, defaults.get(name)) for one in (before, after))) for name in names]
    return [f"{name}: {old} -> {new}" for name, old, new in pairs if old != new]


def to_toml(config: TrainConfig) -> str:
    """Return TOML that `core.config.load(TrainConfig, ...)` reads back to an equal object.

    A schedule that is a function is written as its name, for people: loading such a file is refused.
    """
    if isinstance(config.schedule, str):
        return core_config.dumps(config)
    text = core_config.dumps(dataclasses.replace(config, schedule="constant"))
    return text.replace('schedule = "constant"\n', f'schedule = "{_schedule_text(config.schedule)}"\n', 1)


def recorded_toml(config: TrainConfig) -> str:
    """Return the settings as they are written to config.toml and into every checkpoint, which people publish:
    without user, password and keys in `checkpoint.url`, and with the size of the engine alone, any setting of
    which may be a secret. A run that resumes gets them from its script."""
    url = config.checkpoint.url
    place = dataclasses.replace(config.checkpoint, url=None if url is None else redact_credentials(url))
    return in_a_comment(config.engine) + to_toml(dataclasses.replace(config, engine=None, checkpoint=place))


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
    not_empty(config, "profile")
    if config.run_dir is False and config.resume is not None:
        message = f"resume={config.resume!r} with run_dir=False: a run that keeps nothing cannot be resumed"
        refuse(config, "run_dir", message, "give the folder of the run as run_dir, or leave resume out")
    not_empty(config, "resume")
    not_empty(config, "scheduler_metric")
    if isinstance(config.resume, bool) or (isinstance(config.resume, int) and config.resume < 0):
        remedy = 'use resume="auto", the number of a version, or a tag'
        refuse(config, "resume", f"resume={config.resume!r} is neither a version nor a tag", remedy)
    classes = config.activation_checkpointing
    if not isinstance(classes, bool) and not all(classes):
        message = f"activation_checkpointing={classes} has an empty class name"
        remedy = "name the module classes whose activations are recomputed"
        refuse(config, "activation_checkpointing", message, remedy)


def _check_schedule(config: TrainConfig) -> None:
    """Refuse what is a torch scheduler, or builds one, or asks for what a run does not know."""
    schedule = config.schedule
    kind = schedule if isinstance(schedule, type) else type(schedule)
    name = kind.__name__
    if isinstance(schedule, type) or (hasattr(schedule, "step") and hasattr(schedule, "state_dict")):
        what = "a class" if isinstance(schedule, type) else "a torch scheduler"
        torchs = hasattr(kind, "step") and hasattr(kind, "state_dict")
        refuse(
            config,
            "schedule",
            f"schedule is {what}, {name}, and not a function from the step to a factor",
            f"give the Trainer a function that builds it: paceline.Trainer(..., scheduler=lambda optimizer: "
            f"{name}(optimizer, ...))"
            if torchs
            else f"give an object of the class, {name}(...), or a function: schedule=lambda step: 0.99**step",
        )
    if callable(schedule):
        asked_for(schedule, "schedule")


def _check_unfreeze(config: TrainConfig) -> None:
    for prefix, steps in config.unfreeze.items():
        if not prefix or steps < 1:
            refuse(
                config,
                "unfreeze",
                f"unfreeze={{{prefix!r}: {steps}}}: a part of the model has a name and waits 1 step or more",
                'name what begins to learn after how many steps: unfreeze={"backbone.": 100}',
            )


def _check_metric(settings: EarlyStopping | CheckpointConfig) -> None:
    if not settings.metric:
        remedy = 'name it, such as metric="loss"'
        refuse(settings, "metric", "metric is empty text, which names nothing", remedy)
