"""`paceline.session`: a training loop of the user's with the guarantees of `Trainer`.

    with paceline.session(model, optimizer, config) as run:
        for micro in run.microbatches(dataset):
            run.backward(F.cross_entropy(model(micro.x), micro.y))

Runs in the ranks that exist: of a spawned function, of torchrun, or this process alone. What happens between
two micro-batches is in train/loop/run.py. Must not start workers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.comm.context import DistributedContext
from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import with_article
from paceline.data.sources import as_source
from paceline.frontends import overrides
from paceline.frontends.engine_refusals import refuse_engine
from paceline.frontends.error_folding import folding_context
from paceline.frontends.run_preparation import (
    check_scheduler,
    owns_folder,
    prepare,
    running_job,
    with_measurements,
)
from paceline.monitor.progress import ProgressDisplay
from paceline.train.callbacks import Modifier, Observer
from paceline.train.history import History
from paceline.train.loop import process_setup
from paceline.train.loop.finalize import conclude, save_unsupervised
from paceline.train.loop.run import Run
from paceline.train.loop.run_builder import RunBuilder, RunSpec
from paceline.train.loop.run_hooks import MicroBatch, one_group
from paceline.train.loop.worker_jobs import new_team
from paceline.train.precision import autocast
from paceline.train.settings.conflicts import check
from paceline.train.settings.keyword_hints import explained_function
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state import weight_averages
from paceline.train.state.schedulers import GivenScheduler
from paceline.train.step.misuse_guard import guarded, refuse_wrapped
from paceline.train.stop_signals import NOTHING_KEPT, StopRequest, ending, listening, saved_sentence

_USUAL = TrainConfig()


@explained_function(TrainConfig)
@folding_context
def session(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    config: TrainConfig | None = None,
    *,
    callbacks: Sequence[Observer | Modifier] = (),
    scheduler: GivenScheduler | LRScheduler | None = None,
    context: DistributedContext | None = None,
) -> Iterator[TrainingSession]:
    """Prepare this process for a run of `model`; the run is the loop over `microbatches` of the result.

    `scheduler`: as for `Trainer`, or one that is built over the optimizer; the run steps it.
    `context`: the ranks that train; left out, those of `spawn`, of a launcher or of `init_process_group`.

    After the block `run.history` says what happened. SIGTERM, SIGUSR1 and Ctrl-C finish the step and save;
    then the block ends with `Stopped`, or with a KeyboardInterrupt. A second Ctrl-C interrupts at once.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a session trains a module, not {with_article(model)}", remedy="build the model before"
        )
    config = config or TrainConfig()
    _check(model, config)
    several = scheduler if isinstance(scheduler, Sequence) else [scheduler]
    check_scheduler([one for one in several if not isinstance(one, LRScheduler)])
    joined = running_job("session") if context is None else context
    with ExitStack() as stack:
        group = joined if joined is not None else stack.enter_context(DistributedContext(1, 0))
        settled, folder = prepare(with_measurements(config, callbacks), group)
        if owns_folder(settled, group):
            stack.callback(folder.discard)
        stop = StopRequest()
        stack.enter_context(listening(stop.ask, ctrl_c=True))
        stack.enter_context(process_setup.prepared(settled))
        given = [scheduler] if isinstance(scheduler, LRScheduler) else scheduler
        make = partial(
            RunSpec, model, optimizer, settled, callbacks=callbacks, folder=folder.path, scheduler=given
        )
        run = TrainingSession(group, model, settled, make, stop)
        stack.push(run._close)
        yield run
        run._conclude()
    # Also a signal that came too late, or before the first step, wants the process to end.
    reason = run.stopped or stop.reason
    if reason is not None:
        raise ending(reason, run.history, run.saved_sentence)


@final
class TrainingSession:
    """A run whose loop is the user's; made by `session`."""

    def __init__(
        self,
        context: DistributedContext,
        model: nn.Module,
        config: TrainConfig,
        make_spec: Callable[..., RunSpec],
        stop: StopRequest,
    ) -> None:
        self.context = context
        self.config = config
        self.history: History | None = None
        self.stopped: str | None = None
        self._model, self._make_spec, self._stop = model, make_spec, stop
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._progress = ProgressDisplay()
        self._builder: RunBuilder | None = None
        self._run: Run | None = None
        self._micros: Generator[MicroBatch, None, None] = _nothing()
        self._started = time.perf_counter()

    @property
    def step(self) -> int:
        """The number of steps committed since the start of the run."""
        return 0 if self._run is None else self._run.state.position.step

    @property
    def epoch(self) -> int:
        return 0 if self._run is None else self._run.state.position.epoch

    def microbatches(self, data: Any) -> Iterator[MicroBatch]:
        """Iterate over the micro-batches that this rank computes, to the end of the run."""
        if self._run is not None:
            raise UsageError(
                "microbatches was called twice in one session",
                remedy="one session is one run: set epochs or max_steps in its TrainConfig",
            )
        source = as_source(data)
        check(self.config, samples=source.size, validation=False)
        observers = [self._progress] if self.config.progress and self.context.is_master else []
        spec = self._make_spec(data=source, observers=observers)
        self._builder = RunBuilder(new_team(self.context, self.config), spec, self._device, self._stop)
        self._run = self._builder.run()
        if self.context.is_master:
            self._run.parts.callbacks.notify(Observer.on_start, self._builder.info(self._run))
        self._model.train()
        self._micros = self._handed_out(self._run)
        yield from self._micros

    def _handed_out(self, run: Run) -> Generator[MicroBatch, None, None]:
        guard = guarded(run.parts.optimizers, run.parts.update)
        with guard, one_group(), closing(run.microbatches()) as micros:
            for micro in micros:
                changed = dataclasses.replace(micro, data=run.parts.callbacks.change_batch(micro.data))
                with autocast(self.config.precision, self._device):
                    yield changed

    def backward(self, loss: Tensor, metrics: Mapping[str, Any] | None = None) -> None:
        """Compute the gradients of the loss of the last micro-batch, a mean over its samples."""
        if self._run is None:
            raise UsageError(
                "backward before the first micro-batch",
                remedy="loop over run.microbatches(dataset) and call run.backward(loss) in it",
            )
        with torch.autocast(self._device.type, enabled=False):
            self._run.backward(loss, metrics)

    @property
    def saved_sentence(self) -> str:
        if self.config.run_dir is False:
            return NOTHING_KEPT
        checkpointer = None if self._run is None else self._run.parts.checkpointer
        if checkpointer is None or checkpointer.newest is None:
            return "no version is saved"
        return saved_sentence(checkpointer.newest, checkpointer.newest_step)

    def _conclude(self) -> None:
        if self._run is None:
            return
        self._micros.close()
        with one_group():
            self.history = conclude(self._run, self._started)
        weight_averages.finished(self._run.parts.callbacks.modifiers, self._model)
        self.stopped = self._run.state.ended if self._run.state.stopped_on_request else None

    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()
        # A loop that was left by an error is still inside autocast, and its step half done.
        self._micros.close()
        if self._run is not None and error is not None:
            save_unsupervised(self._run, error)
            if self.context.is_master and self.history is None:
                self._run.parts.callbacks.failed(error)
        if self._builder is not None:
            self._builder.__exit__(kind, error, trace)


def _check(model: nn.Module, config: TrainConfig) -> None:
    """Refuse settings that only `Trainer` can carry out, instead of ignoring them."""
    for engine in (config.engine, overrides.current().engine):
        refuse_engine(engine, "in a session, which trains in the ranks that exist already")
    process_setup.check_initialised(model)
    refuse_wrapped(model)
    if config.micro_batch == "auto":
        raise ConfigError(
            'micro_batch="auto" in a session: only the loop calls the model, so no search can',
            remedy="set micro_batch to a number, or use paceline.Trainer",
        )
    if config.dry_run:
        raise ConfigError(
            "dry_run in a session: the loop is the caller's, and so are the model and the optimizer that it "
            "would change",
            remedy="try the loop with max_steps=2, run_dir in a temporary folder and a copy of the model",
        )
    own = [
        name
        for name in ("compile", "activation_checkpointing")
        if getattr(config, name) != getattr(_USUAL, name)
    ]
    if own:
        raise ConfigError(
            f"{' and '.join(own)} in a session: the loop calls the model itself",
            remedy="do it to the model before the session, and leave the setting out",
        )
    if config.profile is not None:
        raise ConfigError(
            f"profile={config.profile!r} in a session, which computes in this process",
            remedy="put torch.profiler.profile() around the loop, and leave the setting out",
        )
    kinds = {parameter.device.type for parameter in model.parameters()}
    if config.device != "auto" and kinds != {config.device}:
        raise ConfigError(
            f'device="{config.device}", and the model of the session is on {", ".join(sorted(kinds))}',
            remedy=f'move it before: model.to("{config.device}")',
        )


def _nothing() -> Generator[MicroBatch, None, None]:
    yield from ()
