"""The ways to train that the gauntlet disturbs. A new one joins by one line: `add("name", ...)`.

Each is a `FeatureSetup`: what `Trainer` is given, and how it differs from the common settings below. What
has a way in of another kind names it as `drive`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from paceline.core.errors import UsageError
from paceline.frontends import overrides
from paceline.frontends.ddp_trainer.ddp_trainer import PyTorchDDPTrainer
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator
from paceline.frontends.orchestrator.orchestrator_config import TrainingConfig
from paceline.frontends.trainer import Trainer
from paceline.testing.gauntlet import models
from paceline.testing.gauntlet.stepwise_way import train_by_steps
from paceline.train.callbacks import Modifier, Observer
from paceline.train.history import History
from paceline.train.settings.evaluation_config import EvaluationConfig
from paceline.train.settings.train_config import (
    CheckpointConfig,
    DynamicBatch,
    EarlyStopping,
    FaultTolerance,
    GradientCompression,
    LossScaling,
    TrainConfig,
)
from paceline.train.state.weight_averages import EMA, SWA
from paceline.train.stop_signals import Stopped

SHARDS: Final = 4
MAX_STEPS: Final = 90
_BATCH: Final = 16
_DIVISIBLE_BATCH: Final = 12


@final
@dataclass(frozen=True)
class RunResult:
    """Result of a run: the hash of its weights, the loss of each step, and the metrics of evaluations by
    step."""

    hash: str
    losses: tuple[float, ...]
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, history: History, more: str = "") -> RunResult:
        """Return the result of a run with this history; `more`: a hash of what came back besides."""
        losses = tuple(record.loss for record in history.steps)
        return cls(history.state_hash + more, losses, {one.step: one.metrics for one in history.evaluations})


@final
@dataclass(frozen=True, kw_only=True)
class FeatureSetup:
    """One way to train. Data and callbacks are functions: each run gets its own."""

    name: str
    model: Callable[[], Any] = models.mlp
    objective: Callable[..., Any] = models.classify
    optimizer: Callable[[Any], Any] = models.adam
    scheduler: Callable[..., Any] | None = None
    data: Callable[[], Any] = models.numbers
    validation: Callable[[], Any] | None = models.held_out
    evaluation: Callable[[], EvaluationConfig] = EvaluationConfig
    callbacks: Callable[[], Sequence[Observer | Modifier]] = tuple
    settings: Mapping[str, Any] = field(default_factory=dict)
    care: Mapping[str, Any] = field(default_factory=dict)
    drive: Callable[[FeatureSetup, TrainConfig], RunResult] | None = None
    result: Callable[[Trainer], str] | None = None  # a hash of what comes back besides the weights
    supervised: bool = True  # else nothing replaces a process that dies, and no journal has the steps
    quick: bool = True  # else combined from others, or slow: for campaigns and integration tests

    @property
    def takes_chaos(self) -> bool:
        """Return whether its front door lets workers inject failures into themselves."""
        return self.drive is None or not self.supervised

    def config(self, folder: str, workers: int, **changes: Any) -> TrainConfig:
        """Return the settings of one run; only the number of workers differs between runs."""
        care = {"max_worker_failures": 1000, "backoff": 0.01, **self.care, **changes.pop("care", {})}
        given = {
            "shards": SHARDS,
            "threads": 1,
            "global_batch": _BATCH,
            "max_steps": MAX_STEPS,
            "evaluate_every": 25,
            "seed": 5,
            "device": "cpu",
            "progress": False,
            "checkpoint": CheckpointConfig(every_steps=15, every_epochs=None),
            **self.settings,
            **changes,
        }
        if self.validation is None and self.evaluation is EvaluationConfig:
            given.pop("evaluate_every")
        return TrainConfig(workers=workers, run_dir=folder, fault_tolerance=FaultTolerance(**care), **given)

    def run(self, config: TrainConfig) -> RunResult:
        """Train to the end; `train.signals.Stopped` where the run was asked to stop before it."""
        if self.drive is not None:
            return self.drive(self, config)
        trainer = Trainer(
            self.model,
            self.objective,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            config=config,
            callbacks=self.callbacks(),
            evaluation=self.evaluation(),
        )
        history = trainer.fit(self.data(), None if self.validation is None else self.validation())
        return RunResult.of(history, "" if self.result is None else self.result(trainer))


def orchestrate(setup: FeatureSetup, config: TrainConfig) -> RunResult:
    """Train the same from an event loop."""

    async def train() -> RunResult:
        settings = TrainingConfig(
            # Per worker in this front door: the global batch stays the same for 1 to 4 of them.
            batch_size=_DIVISIBLE_BATCH // config.workers,
            epochs=6,
            checkpoint_every_steps=15,
            max_worker_failures=1000,
            shards=SHARDS,
            seed=config.seed,
            threads=1,
            fault_tolerance=config.fault_tolerance.enabled,
            run_dir=config.run_dir or None,
            resume=config.resume is not None,
        )
        async with DistributedTrainingOrchestrator(config.workers) as orchestrator:
            result = await orchestrator.train_distributed(
                settings,
                model=setup.model,
                dataset=setup.data(),
                objective=setup.objective,
                optimizer=setup.optimizer,
            )
        if result["stopped"] is not None:
            raise Stopped(result["stopped"], None)
        return RunResult(result["state_hash"], tuple(result["losses"]))

    return asyncio.run(train())


def train_per_gpu(setup: FeatureSetup, config: TrainConfig) -> RunResult:
    """Train the same with counts per GPU: accumulation steps make up for GPUs that are not there."""
    settings = {
        "seed": config.seed,
        "threads": 1,
        "device": "cpu",
        "progress": False,
        "checkpoint.every_steps": 15,
        "fault_tolerance.enabled": config.fault_tolerance.enabled,
        "fault_tolerance.max_worker_failures": config.fault_tolerance.max_worker_failures,
        "fault_tolerance.backoff": config.fault_tolerance.backoff,
    }
    trainer = PyTorchDDPTrainer(
        setup.model,
        num_gpus=config.workers,
        batch_size=1,
        gradient_accumulation_steps=_DIVISIBLE_BATCH // config.workers,
        epochs=6,
        optimizer=setup.optimizer,
        loss_fn=setup.objective,
        scheduler=setup.scheduler,
        checkpoint_dir=config.run_dir or None,
        resume_from_checkpoint=config.resume is not None,
    )
    with overrides.in_force(overrides.Overrides(options=settings)):
        validation = None if setup.validation is None else setup.validation()
        history = trainer.fit(setup.data(), validation, max_steps=MAX_STEPS)
    return RunResult.of(history)


def train_step_by_step(setup: FeatureSetup, config: TrainConfig) -> RunResult:
    """Train in processes that go on without those that die."""
    return RunResult(*train_by_steps(config, MAX_STEPS, "manager"))


def train_in_session(setup: FeatureSetup, config: TrainConfig) -> RunResult:
    """Train in processes that end with one that dies, and are started again."""
    return RunResult(*train_by_steps(config, MAX_STEPS, "session"))


FEATURES: Final[dict[str, FeatureSetup]] = {}


def add(name: str, **given: Any) -> FeatureSetup:
    """Have the gauntlet run this way to train; see `FeatureSetup` for what can be given."""
    if name in FEATURES:
        raise UsageError(f"the gauntlet has a feature {name!r} already", remedy="choose another name")
    setup = FEATURES[name] = FeatureSetup(name=name, **given)
    return setup


def compressed(kind: str, **more: Any) -> dict[str, Any]:
    keep = {"keep": 0.3} if kind == "top-k" else {}
    return {"compression": GradientCompression(kind=kind, **keep, **more)}  # type: ignore[arg-type]


_sparse = {"data": models.words, "validation": models.held_out_words}

add("dropout")
add("batch-norm", model=models.with_batch_norm)
add("sync batch-norm", model=models.WithSyncedNorm)
add(
    "sync batch-norm, fp16, compression",
    model=models.WithSyncedNorm,
    settings={
        "precision": "fp16",
        "loss_scaling": LossScaling(initial=2.0**20, growth_interval=9),
        "audit_every": 10,
        **compressed("int8"),
    },
)
add("two dtypes", model=models.TwoDtypes)
add("sparse", model=models.WordBag, optimizer=models.dense_and_sparse, **_sparse)
add("sparse momentum", model=models.WordBag, optimizer=models.sparse_momentum, **_sparse)
add("sparse only", model=models.sparse_only, optimizer=models.sparse_adam, **_sparse)
for _kind in ("int8", "int4", "top-k", "fp16", "bf16"):
    add(f"compression {_kind}", settings=compressed(_kind))
add("compression without feedback", settings=compressed("int8", error_feedback=False))
add("compression and batch-norm", model=models.with_batch_norm, settings=compressed("int8"))
add(
    "fp16 with skipped steps",
    settings={"precision": "fp16", "loss_scaling": LossScaling(initial=2.0**24, growth_interval=7)},
)
add("bf16", settings={"precision": "bf16"})
add(
    "dynamic batch",
    settings={"dynamic_batch": DynamicBatch(8, 32, variance_threshold=0.05, hold=10), "global_batch": 8},
)
add("stateful modifier", callbacks=lambda: (models.Momentum(),))
add("modifier that communicates", model=models.with_batch_norm, callbacks=lambda: (models.Agreeing(),))
add(
    "it communicates, int8",
    quick=False,
    callbacks=lambda: (models.Agreeing(),),
    settings={**compressed("int8"), "nonfinite": "skip"},
)
add("several optimizers", optimizer=models.two_optimizers)
add("clipped, with a schedule", optimizer=models.sgd, settings={"clip_norm": 0.3, "schedule": "cosine"})
add(
    "scheduler by epoch",
    optimizer=models.two_optimizers,
    scheduler=models.cosine_and_plateau,
    settings={"evaluate_every": None, "checkpoint": CheckpointConfig(every_steps=13)},
)
add(
    "scheduler by step",
    scheduler=models.one_cycle,
    settings={"scheduler_interval": "step", "clip_norm": 0.5, "schedule": models.slower},
)
add(
    "steps that are not finite",
    model=models.with_batch_norm,
    objective=models.risky,
    settings={"nonfinite": "skip", "log_grad_norm": True, **compressed("int8")},
)
add(
    "alternating optimizers",
    model=models.Gan,
    objective=models.adversarial,
    optimizer=models.critic_and_maker,
    settings={"optimizer_turns": (2, 1), "clip_norm": 0.5},
)
add(
    "ema, step in the objective",
    objective=models.annealed,
    callbacks=lambda: (EMA(0.95, evaluate=True),),
    result=models.averaged,
)
add("weighted order", data=models.weighted_numbers)
add(
    "swa over length buckets",
    data=models.bucketed_numbers,
    callbacks=lambda: (SWA(start_step=30, every=7),),
    result=models.averaged,
)
add(
    "unfreeze",
    model=models.with_batch_norm,
    optimizer=models.sgd,
    settings={"unfreeze": {"0.": 30, "1.": 47}, "limit_batches": 11, "limit_validation": 1},
)
add(
    "unfreeze, recomputed",
    quick=False,
    model=models.with_batch_norm,
    settings={
        "unfreeze": {"0.": 30, "1.": 47},
        "micro_batch": 2,
        "activation_checkpointing": True,
        "drop_last": True,
    },
)
# Batches of one shape alone, each of which is compiled for every set of parameters that learn.
add(
    "unfreeze, compiled",
    settings={"unfreeze": {"0.": 30}, "compile": True, "drop_last": True, "limit_validation": 1},
    quick=False,
)
add(
    "evaluation of its own, restored",
    validation=None,
    evaluation=models.two_held_out_sets,
    settings={
        "evaluate_every": 7,
        "early_stopping": EarlyStopping(metric="far/macro_f1", mode="max", patience=4, restore_best=True),
        "checkpoint": CheckpointConfig(every_steps=7, metric="far/macro_f1", mode="max"),
    },
)
add(
    "ema, plateau, not finite",
    model=models.with_batch_norm,
    objective=models.risky,
    scheduler=models.plateau,
    evaluation=models.two_held_out_sets,
    callbacks=lambda: (EMA(0.9, evaluate=True),),
    settings={
        "evaluate_every": 9,
        "scheduler_interval": "step",
        "scheduler_metric": "far/macro_f1",
        "nonfinite": "skip",
    },
    result=models.averaged,
)
add(
    "plateau by epoch, buckets",
    quick=False,
    data=models.bucketed_numbers,
    optimizer=models.two_optimizers,
    scheduler=models.cosine_and_plateau,
    evaluation=models.two_held_out_sets,
    settings={"scheduler_metric": "far/spread", "limit_batches": 9},
)
add(
    "swa, restored",
    quick=False,
    evaluation=models.two_held_out_sets,
    callbacks=lambda: (SWA(start_step=20, every=5, evaluate=True),),
    settings={
        "evaluate_every": 6,
        "early_stopping": EarlyStopping(metric="near/loss", patience=4, min_delta=0.01, restore_best=True),
    },
    result=models.averaged,
)
add(
    "turns and schedulers",
    quick=False,
    model=models.Gan,
    objective=models.adversarial,
    optimizer=models.critic_and_maker,
    scheduler=models.cosine_and_step,
    settings={"optimizer_turns": (3, 1), "checkpoint": CheckpointConfig(every_steps=10)},
)
add("stream", data=models.NumberStream)
add("loader processes", data=models.loader)
add("backup", care={"stragglers": "backup"})
add("accumulate", settings={"micro_batch": 2})
add("auto micro-batch", settings={"micro_batch": "auto"})
add(
    "early stop",
    settings={
        "evaluate_every": 8,
        "early_stopping": EarlyStopping(metric="loss", patience=3, min_delta=0.05),
    },
)
add("audited", settings={"audit_every": 10})
add("checksums", care={"checksums": True})
add("orchestrator", validation=None, drive=orchestrate)
add("counts per GPU", validation=None, drive=train_per_gpu)
add("counts per GPU, plateau", scheduler=models.plateau, drive=train_per_gpu)
add("step by step", validation=None, drive=train_step_by_step, supervised=False)
add("session, scheduler and ema", validation=None, drive=train_in_session, supervised=False)


def undisturbed(setup: FeatureSetup, folder: str) -> RunResult:
    """Train in one process without a supervisor: every disturbed run must end with this result."""
    config = setup.config(folder, 1)
    alone = dataclasses.replace(config.fault_tolerance, enabled=False)
    return setup.run(dataclasses.replace(config, fault_tolerance=alone))
