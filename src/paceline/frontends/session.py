"""`paceline.session`: a training loop of one's own with the guarantees of `Trainer`.

    with paceline.session(model, optimizer, config) as run:
        for micro in run.microbatches(dataset):
            run.backward(F.cross_entropy(model(micro.x), micro.y))

Runs in the ranks that exist: of a spawned function, of torchrun, or this process alone. What happens between
two micro-batches is in train/run.py. Must not start workers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.context import DistributedContext
from paceline.core.errors import ConfigError, UsageError
from paceline.core.words import a_kind
from paceline.data.sources import as_source
from paceline.frontends.joining import prepare, running_job
from paceline.train import run_setup
from paceline.train.assembly import Assembled, Given
from paceline.train.callbacks import Modifier, Observer
from paceline.train.checks import check
from paceline.train.config import TrainConfig
from paceline.train.ending import conclude
from paceline.train.history import History
from paceline.train.last_save import save_unsupervised
from paceline.train.loop_guard import guarded, refuse_wrapped
from paceline.train.precision import autocast
from paceline.train.progress import Progress
from paceline.train.run import Run
from paceline.train.run_parts import Micro
from paceline.train.signals import StopRequest, ending, listening, saved_words
from paceline.train.worker import new_team

_USUAL = TrainConfig()


@contextmanager
def session(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    config: TrainConfig | None = None,
    *,
    callbacks: Sequence[Observer | Modifier] = (),
) -> Iterator[Session]:
    """Prepares this process for a run of `model`; `microbatches` of what it gives are the run.

    After the block `run.history` says what happened. SIGTERM, SIGUSR1 and Ctrl-C finish the step and save;
    then the block ends with `Stopped`, or with a KeyboardInterrupt. A second Ctrl-C interrupts at once.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a session trains a module, not {a_kind(model)}", remedy="build the model before")
    config = config or TrainConfig()
    _check(model, config)
    joined = running_job("session")
    with ExitStack() as stack:
        context = joined if joined is not None else stack.enter_context(DistributedContext(1, 0))
        settled, folder = prepare(config, context)
        stop = StopRequest()
        stack.enter_context(listening(stop.ask, ctrl_c=True))
        stack.enter_context(run_setup.prepared(settled))
        run = Session(context, model, optimizer, settled, callbacks, folder, stop)
        stack.push(run._close)
        yield run
        run._conclude()
    # Also a signal that came too late, or before the first step, wants the process to end.
    reason = run.stopped or stop.reason
    if reason is not None:
        raise ending(reason, run.history, run.saved_words)


@final
class Session:
    """A run whose loop is the user's; made by `session`."""

    def __init__(
        self,
        context: DistributedContext,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        config: TrainConfig,
        callbacks: Sequence[Observer | Modifier],
        folder: Any,
        stop: StopRequest,
    ) -> None:
        self.context = context
        self.config = config
        self.history: History | None = None
        self.stopped: str | None = None
        self._model, self._optimizer, self._callbacks = model, optimizer, callbacks
        self._folder, self._stop = folder, stop
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._progress = Progress()
        self._assembled: Assembled | None = None
        self._run: Run | None = None
        self._micros: Generator[Micro, None, None] = _nothing()
        self._started = time.perf_counter()

    @property
    def step(self) -> int:
        """Committed steps since the start of the run."""
        return 0 if self._run is None else self._run.position.step

    @property
    def epoch(self) -> int:
        return 0 if self._run is None else self._run.position.epoch

    def microbatches(self, data: Any) -> Iterator[Micro]:
        """The micro-batches that this rank is to compute, to the end of the run."""
        if self._run is not None:
            raise UsageError(
                "microbatches was called twice in one session",
                remedy="one session is one run: set epochs or max_steps in its TrainConfig",
            )
        source = as_source(data)
        check(self.config, samples=source.size, validation=False)
        observers = [self._progress] if self.config.progress and self.context.is_master else []
        given = Given(
            self._model, self._optimizer, self.config, source, self._callbacks, self._folder.path, observers
        )
        self._assembled = Assembled(new_team(self.context, self.config), given, self._device, self._stop)
        self._run = self._assembled.run()
        if self.context.is_master:
            self._assembled.callbacks.start(self._assembled.info(self._run))
        self._model.train()
        self._micros = self._handed_out(self._run, self._assembled)
        yield from self._micros

    def _handed_out(self, run: Run, assembled: Assembled) -> Generator[Micro, None, None]:
        guard = guarded(assembled.optimizers, assembled.update)
        with guard, closing(run.microbatches()) as micros:
            for micro in micros:
                changed = dataclasses.replace(micro, data=assembled.callbacks.change_batch(micro.data))
                with autocast(self.config.precision, self._device):
                    yield changed

    def backward(self, loss: Tensor, metrics: Mapping[str, Any] | None = None) -> None:
        """The loss of the last micro-batch, a mean over its samples."""
        if self._run is None:
            raise UsageError(
                "backward before the first micro-batch",
                remedy="loop over run.microbatches(dataset) and call run.backward(loss) in it",
            )
        with torch.autocast(self._device.type, enabled=False):
            self._run.backward(loss, metrics)

    @property
    def saved_words(self) -> str:
        saver = None if self._assembled is None else self._assembled.saver
        if saver is None or saver.newest is None:
            return "no version is saved"
        return saved_words(saver.newest, saver.newest_step)

    def _conclude(self) -> None:
        if self._run is None or self._assembled is None:
            return
        self._micros.close()
        self.history = conclude(self._run, self._assembled, self._started)
        self.stopped = self._run.ended if self._run.stopped_on_request else None

    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()
        # A loop that was left by an error is still inside autocast, and its step half done.
        self._micros.close()
        if self._assembled is not None and self._run is not None and error is not None:
            save_unsupervised(self._run, self._assembled, error)
        if self._assembled is not None:
            self._assembled.__exit__(kind, error, trace)


def _check(model: nn.Module, config: TrainConfig) -> None:
    """Settings that `Trainer` carries out by itself are the loop's own business here, and never ignored."""
    run_setup.check_initialised(model)
    refuse_wrapped(model)
    if config.micro_batch == "auto":
        raise ConfigError(
            'micro_batch="auto" in a session: the loop calls the model itself, so nobody else can try',
            remedy="set micro_batch to a number, or use paceline.Trainer",
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
    kinds = {parameter.device.type for parameter in model.parameters()}
    if config.device != "auto" and kinds != {config.device}:
        raise ConfigError(
            f'device="{config.device}", and the model of the session is on {", ".join(sorted(kinds))}',
            remedy=f'move it before: model.to("{config.device}")',
        )


def _nothing() -> Generator[Micro, None, None]:
    yield from ()
