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
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator
from paceline.frontends.orchestrator.orchestrator_config import TrainingConfig
from paceline.frontends.trainer import Trainer
from paceline.testing.gauntlet import models
from paceline.train.callbacks import Modifier, Observer
from paceline.train.settings.train_config import (
    CheckpointConfig,
    DynamicBatch,
    EarlyStopping,
    FaultTolerance,
    GradientCompression,
    LossScaling,
    TrainConfig,
)
from paceline.train.stop_signals import Stopped

SHARDS: Final = 4
MAX_STEPS: Final = 90
_BATCH: Final = 16
_DIVISIBLE_BATCH: Final = 12


@final
@dataclass(frozen=True)
class RunResult:
    """Result of a run: the hash of its weights, and the loss of each step."""

    hash: str
    losses: tuple[float, ...]


@final
@dataclass(frozen=True, kw_only=True)
class FeatureSetup:
    """One way to train. Data and callbacks are functions: each run gets its own."""

    name: str
    model: Callable[[], Any] = models.mlp
    objective: Callable[..., Any] = models.classify
    optimizer: Callable[[Any], Any] = models.adam
    data: Callable[[], Any] = models.numbers
    validation: Callable[[], Any] | None = models.held_out
    callbacks: Callable[[], Sequence[Observer | Modifier]] = tuple
    settings: Mapping[str, Any] = field(default_factory=dict)
    care: Mapping[str, Any] = field(default_factory=dict)
    drive: Callable[[FeatureSetup, TrainConfig], RunResult] | None = None

    @property
    def takes_chaos(self) -> bool:
        """Return whether its front door lets workers inject failures into themselves."""
        return self.drive is None

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
        if self.validation is None:
            given.pop("evaluate_every")
        return TrainConfig(workers=workers, run_dir=folder, fault_tolerance=FaultTolerance(**care), **given)

    def run(self, config: TrainConfig) -> RunResult:
        """Train to the end; `train.signals.Stopped` where the run was asked to stop before it."""
        if self.drive is not None:
            return self.drive(self, config)
        callbacks = self.callbacks()
        trainer = Trainer(
            self.model, self.objective, optimizer=self.optimizer, config=config, callbacks=callbacks
        )
        history = trainer.fit(self.data(), None if self.validation is None else self.validation())
        return RunResult(history.state_hash, tuple(record.loss for record in history.steps))


def orchestrate(setup: FeatureSetup, config: TrainConfig) -> RunResult:
    """Train the same from an event loop."""

    async def train() -> RunResult:
        settings = TrainingConfig(
            # Per worker in this front door: the global batch stays the same for 1 to 4 of them.
            batch_size=_DIVISIBLE_BATCH // config.workers,
            epochs=6,
            checkpoint_interval=15,
            max_worker_failures=1000,
            shards=SHARDS,
            seed=config.seed,
            threads=1,
            fault_tolerance=config.fault_tolerance.enabled,
            run_dir=config.run_dir,
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
add("several optimizers", optimizer=models.two_optimizers)
add("clipped, with a schedule", optimizer=models.sgd, settings={"clip_norm": 0.3, "schedule": "cosine"})
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


def undisturbed(setup: FeatureSetup, folder: str) -> RunResult:
    """Train in one process without a supervisor: every disturbed run must end with this result."""
    config = setup.config(folder, 1)
    alone = dataclasses.replace(config.fault_tolerance, enabled=False)
    return setup.run(dataclasses.replace(config, fault_tolerance=alone))
