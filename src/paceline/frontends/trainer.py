"""`paceline.Trainer`: train, evaluate and predict on many workers with the result of one.

Called from a plain script or a notebook it starts the workers; inside a job that is already started (a
spawned function, torchrun, `init_process_group`) it joins. What a worker does is in train/; here is only how
a run is prepared, started and handed back. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from paceline.core.errors import ConfigError, PacelineError, PeerLostError, ResourceError, UsageError
from paceline.core.events import WorkerFailed
from paceline.core.journal import Journal
from paceline.core.words import a_kind
from paceline.engines.local import payload
from paceline.frontends import overrides, supervised, tensor_payload
from paceline.frontends.joining import as_recorded, prepare, running_job
from paceline.frontends.spawn import spawn
from paceline.frontends.supervised import record_command
from paceline.train.callbacks import Callbacks, Modifier, Observer
from paceline.train.checks import check
from paceline.train.config import TrainConfig
from paceline.train.nesting import refuse_inside
from paceline.train.run_folder import RunFolder
from paceline.train.run_lock import held
from paceline.train.signals import ending, interrupted, leave_request, listening
from paceline.train.wrong_names import explained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

    from paceline.comm.context import DistributedContext
    from paceline.train.history import History
    from paceline.train.optimizers import OptimizerFactory
    from paceline.train.replay import Replayed
    from paceline.train.worker import Trained, TrainJob

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Optimizers and deterministic kernels import torch's compiler, hundreds of modules: once for all workers.
_PRELOAD = ("paceline.train.worker", "torch._inductor.config")
_LOOK_SECONDS = 0.25


@explained
@final
class Trainer:
    """A model, what it is to learn, and how.

        trainer = paceline.Trainer(model, objective, optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
                                   config=paceline.TrainConfig(workers=4, global_batch=256, epochs=3))
        history = trainer.fit(train_data, val_data)

    model       a module, or a function that builds one (with randomness from the run's seed)
    objective   a loss module (output, target), or a function (model, batch) -> loss or (loss, metrics)
    optimizer   a function from parameters (with names in `p.named`) to one or several optimizers
    callbacks   Observers and Modifiers

    After `fit` the caller's module holds the trained weights; one that was built is `trainer.model`.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        objective: Callable[..., Any],
        *,
        optimizer: OptimizerFactory | Optimizer | Sequence[Optimizer],
        config: TrainConfig | None = None,
        callbacks: Sequence[Observer | Modifier] = (),
    ) -> None:
        if not callable(model):
            raise UsageError(
                f"the model is {a_kind(model)}",
                remedy="pass a torch.nn.Module or a function that builds one",
            )
        if not callable(optimizer) and not _is_optimizer(optimizer):
            raise UsageError(
                f"the optimizer is {optimizer!r:.60}",
                remedy="pass a function from parameters to an optimizer: "
                "optimizer=lambda p: torch.optim.AdamW(p, 1e-3)",
            )
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.config = config or TrainConfig()
        self.callbacks = tuple(callbacks)
        self._settled: TrainConfig | None = None  # of the last fit, with nothing left open
        Callbacks(self.callbacks)  # refused here, before a worker starts

    def fit(self, train_data: Any, val_data: Any = None) -> History:
        """Trains to the end that the config names, or until told to stop, and returns what happened.

        SIGTERM and SIGUSR1 finish the step, save and raise `Stopped`, which ends the process with code 75; a
        state that cannot be saved then is an error instead. Ctrl-C finishes the step, saves and raises a
        KeyboardInterrupt; a second one ends at once. An error of the model, the objective or the data ends
        the run too, after the last committed step was saved.
        """
        try:
            return self._fit(train_data, val_data)
        except PacelineError as error:
            if error.fault == "ours":
                raise
            # Paceline's own frames say nothing about what the program did.
            raise error.with_traceback(None) from error.__cause__
        except KeyboardInterrupt as error:
            if str(error):
                raise error.with_traceback(None) from None
            raise interrupted("stopped by Ctrl-C before the run had begun") from None

    def _fit(self, train_data: Any, val_data: Any) -> History:
        from paceline.data.sources import as_source, check_apart
        from paceline.train import worker
        from paceline.train.history import History
        from paceline.train.objective import Objective
        from paceline.train.own_process import OwnProcess

        refuse_inside("fit")
        interceptor = overrides.interceptor()
        if interceptor is not None:
            intercepted: History = interceptor(self, train_data, val_data)
            return intercepted
        given = overrides.current().apply(self.config)
        Objective(self.objective)
        source, validation = as_source(train_data), None if val_data is None else as_source(val_data)
        context = running_job()
        url = given.checkpoint.url or ""
        if context is None and url.startswith("memory:"):
            raise ConfigError(
                f"checkpoint.url={url!r}: the workers would write to their own memory, which ends with them",
                remedy="give a folder or a URL that outlives the workers; memory:// is for paceline.session",
                key="checkpoint.url",
            )
        if validation is not None:
            check_apart(source, validation)
        # Refused before a folder is made or a worker starts.
        config, folder = prepare(
            given,
            context,
            lambda settled: check(settled, samples=source.size, validation=validation is not None),
        )
        self._settled = config
        job = worker.TrainJob(
            model=self.model,
            objective=self.objective,
            optimizer=self.optimizer,
            config=config,
            train=source,
            validation=validation,
            callbacks=self.callbacks,
            folder=folder.path,
            stop_file=None if context is not None else folder.stop_file,
            process=None if context is not None else OwnProcess.like_this_one(),
        )
        if config.micro_batch == "auto":
            found = (
                worker.find_micro_batch(context, dataclasses.replace(job, model=self._built()))
                if context is not None
                else self._search(job)
            )
            # Part of the run's definition from now on: the same for whoever computes it.
            config = self._settled = dataclasses.replace(config, micro_batch=found)
            job = dataclasses.replace(job, config=config)
            if context is None or context.is_master:
                folder.save_config(config)
        if context is not None:
            trained = worker.train(context, dataclasses.replace(job, model=self._built()))
            done = History.from_dict(context.broadcast(trained.history and trained.history.to_dict()))
        elif config.fault_tolerance.enabled:
            record_command(folder)
            trained, asked, saved = _look_after(job)
            assert trained.history is not None
            done = trained.history
            self._take_weights(trained.weights)
            if asked or trained.stopped is not None:
                # Also where the workers had ended when it came: whoever sent it wants this process to end.
                raise ending(asked[0] if asked else str(trained.stopped), done, saved)
        else:
            # The lock first: the file is the other run's where there is one.
            with held(folder.lock_file, str(folder.path)), _forwarding_signals(folder.stop_file) as asked:
                try:
                    trained = self._spawn(worker.train, job)
                except PeerLostError as error:
                    _note_lost(folder, error)
                    raise
                assert trained.history is not None
                done = trained.history
                self._take_weights(trained.weights)
            if trained.stopped is None and asked:
                # The workers had ended when it came; whoever sent it wants this process to end.
                raise ending(asked[0], done)
        if trained.stopped is not None:
            raise ending(trained.stopped, done, 'start again with resume="auto" to go on')
        return done

    def evaluate(self, data: Any) -> dict[str, float]:
        """Means of loss and metrics over the data, the same bits on any number of workers, and as `fit` has
        them: with the shards and threads of the last `fit`, else of the run that `resume` names."""
        from paceline.train import worker

        return self._pass_over(worker.evaluate, data)

    def predict(self, data: Any) -> Any:
        """The model's outputs, in the order of the data; inside a job, on every rank of it.

        Ranks other than the first have them in plain dicts, lists and tuples, whatever kind the model gives.
        """
        from paceline.data.containers import plain
        from paceline.train import worker

        outputs = self._pass_over(worker.predict, data)
        context = running_job("predict")
        if context is None or context.world_size == 1:
            return outputs
        told = context.broadcast(plain(outputs) if context.is_master else None)
        return outputs if context.is_master else told

    def replay(self, run_dir: str | os.PathLike[str], step: int, shard: int, train_data: Any) -> Replayed:
        """Computes one shard's gradient of one step of an earlier run again, here, and compares its hash with
        the one in the run's journal (of steps that TrainConfig(audit_every=...) names)."""
        from paceline.frontends.replaying import replay_fit

        return replay_fit(self, run_dir, step, shard, train_data)

    # inside

    def _pass_over(self, function: Callable[[DistributedContext, TrainJob], T], data: Any) -> T:
        from paceline.data.sources import as_source
        from paceline.train.worker import TrainJob

        context = running_job(function.__name__)
        workers = self.config.workers if context is None else context.world_size
        config = dataclasses.replace(self._settled or as_recorded(self.config), workers=workers)
        job = TrainJob(self.model, self.objective, None, config, as_source(data))
        return function(context, job) if context is not None else self._spawn(function, job)

    def _search(self, job: TrainJob) -> int:
        """The search for a micro-batch leaves no trace, so what befalls its workers befalls only the search:
        it begins again, for as many lost processes as a worker has in its budget, and once after an error
        that need not come again."""
        from paceline.train import worker

        care = job.config.fault_tolerance
        lost = raised = 0
        while True:
            try:
                return self._spawn(worker.find_micro_batch, job)
            except PacelineError as error:
                if isinstance(error, PeerLostError):
                    lost += 1
                    over = lost > care.max_worker_failures
                else:
                    raised += 1
                    over = raised > 1 or error.fault == "user" or isinstance(error, ResourceError)
                if over or not care.enabled:
                    raise
                _log.warning('the search for micro_batch="auto" begins again: %s', error.message)

    def _spawn(self, function: Callable[[DistributedContext, TrainJob], T], job: TrainJob) -> T:
        config = job.config
        try:
            results = spawn(
                function,
                job,
                workers=config.workers,
                threads=config.threads,
                comm_timeout=config.timeout,
                preload=_PRELOAD,
            )
        except UsageError as error:
            raise _name_part(job, error) from error.__cause__
        return results[0]

    def _take_weights(self, weights: dict[str, Any]) -> None:
        import torch

        from paceline.train.state import model_tensors

        with torch.no_grad():
            for name, tensor in model_tensors(self._built()).items():
                tensor.copy_(weights[name])

    def _built(self) -> nn.Module:
        """The module; one that a function makes is made once, and the caller's generators do not notice."""
        from torch import nn

        from paceline.data.generators import new_numpy, set_aside
        from paceline.train.run_setup import build_model

        if not isinstance(self.model, nn.Module):
            with set_aside(new_numpy()):
                self.model = build_model(self.model, self.config.seed)
        return self.model


def _look_after(job: TrainJob) -> tuple[Trained, list[str], str]:
    """The run under a supervisor, the signals that asked it to stop, and what was saved."""
    asked: list[str] = []
    observers: tuple[Observer, ...] = ()
    with ExitStack() as stack:
        if job.config.progress:
            # Here, not above: a terminal library that draws a random number when imported.
            from paceline.train.progress import Progress

            progress = Progress()
            stack.callback(progress.close)
            observers = (progress,)
        try:
            running = stack.enter_context(supervised.start(job, observers=observers))
        except UsageError as error:
            raise _name_part(job, error) from error.__cause__
        stack.enter_context(listening(asked.append, ctrl_c=True))
        told = False
        try:
            while not running.wait(_LOOK_SECONDS):
                if asked and not told:
                    told = True
                    running.stop(asked[0])
        except KeyboardInterrupt:
            raise interrupted(f"ended at once by a second Ctrl-C; {running.saved_words}") from None
        if running.stopped_before_it_began is not None:
            raise ending(running.stopped_before_it_began, None)
        return running.result(), asked, running.saved_words


def _is_optimizer(given: object) -> bool:
    """An optimizer or several; told apart without importing torch."""
    several = list(given) if isinstance(given, Sequence) else [given]
    return bool(several) and all(hasattr(one, "param_groups") for one in several)


def _note_lost(folder: RunFolder, error: PeerLostError) -> None:
    """A worker that was killed could not write into the journal that it failed."""
    rank, pid = error.rank, error.facts.get("pid")
    if rank is None or not isinstance(pid, int):
        return
    reason = error.message.splitlines()[0]
    # The error itself says more than the journal would.
    with suppress(PacelineError), Journal(folder.journal_file) as journal:
        journal.append(WorkerFailed(time=time.time(), rank=rank, pid=pid, phase="training", reason=reason))


def _name_part(job: TrainJob, error: UsageError) -> UsageError:
    """The same error; where the job could not be sent, one that names what of it."""
    if not str(error).startswith("argument 1 of "):
        return error
    if job.config.fault_tolerance.enabled:
        # Observers stay here.
        job = dataclasses.replace(job, callbacks=[one for one in job.callbacks if isinstance(one, Modifier)])
    from paceline.data.naming import given_name

    for name, part in [(field.name, getattr(job, field.name)) for field in dataclasses.fields(job)]:
        try:
            os.close(payload.dump(part, reducers=tensor_payload.reducers()))
        except Exception as reason:
            kind = given_name(part)
            what = f"the {name.replace('train', 'training data')}, of type {kind},"
            remedy = (
                "pass a function that builds the model"
                if name == "model"
                else "make it inside the function that uses it, and keep locks, files and sockets out of it"
            )
            return UsageError(
                f"{what} cannot be sent to the workers: {type(reason).__name__}: {reason}", remedy=remedy
            )
    return error


@contextmanager
def _forwarding_signals(stop_file: Path) -> Iterator[list[str]]:
    """A signal to this process asks the workers, which look for the file after every step. What was asked for
    is also in the list."""
    asked: list[str] = []

    def pass_on(reason: str) -> None:
        asked.append(reason)
        leave_request(stop_file, reason)

    stop_file.unlink(missing_ok=True)
    try:
        with listening(pass_on, ctrl_c=True):
            yield asked
    finally:
        stop_file.unlink(missing_ok=True)
