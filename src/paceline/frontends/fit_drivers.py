"""Drivers of `Trainer.fit`, of one shape: a job in, a `FitResult` out.

    fit_in_job      on the ranks of a job that exists already (a spawned function, torchrun)
    fit_in_caller   in the caller's process, where a debugger or a profiler watches it
    fit_supervised  on workers that a supervisor starts and replaces
    fit_spawned     on spawned ranks, of which the first failure ends the run

Each handles its own signals and errors (a job that exists already has its own signal handlers); what a stop
request means to the caller is in `FitResult`. Importing
this module does not import torch.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, final

from paceline.comm import default_group, tensor_pickling
from paceline.core.errors import PacelineError, PeerLostError, ResourceError, UsageError
from paceline.core.events import WorkerFailed
from paceline.core.journal import Journal
from paceline.engines.local import memfd_pickle
from paceline.frontends.caller_tools import profiler_is_active, watching_tool
from paceline.frontends.run_preparation import owns_folder
from paceline.frontends.spawn import spawn
from paceline.frontends.supervised_run import SupervisedRun
from paceline.monitor.progress_factory import progress_display
from paceline.train.callbacks import Modifier
from paceline.train.history import History
from paceline.train.loop.training_thread import PRELOAD
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_lock import held
from paceline.train.step_info import StepInfo
from paceline.train.stop_signals import SAME_SIGNAL_SECONDS, ending, interrupted, listening, write_stop_file

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.comm.context import DistributedContext
    from paceline.train.loop.worker_jobs import TrainJob, TrainResult
    from paceline.train.settings.train_config import TrainConfig

T = TypeVar("T")
_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_RESUME = 'start again with resume="auto" to continue'


_BEGINNING = StepInfo()


@final
@dataclass(frozen=True)
class FitResult:
    """Result of a driver.

    weights      of the trained model, by name; None where the caller's module was trained in place
    stop_signal  why the caller's process was asked to end, also if the run had come to its end by then
    saved        a sentence about what a run that is started again continues from
    averages     of each EMA or SWA among the callbacks; empty where the caller's own were in the run
    reached      the place in the run of the weights
    """

    history: History
    weights: dict[str, Any] | None = None
    stop_signal: str | None = None
    saved: str = ""
    averages: Sequence[dict[str, Any] | None] = ()
    reached: StepInfo = _BEGINNING


@contextmanager
def keeping_nothing(context: DistributedContext | None, job: TrainJob) -> Iterator[None]:
    """Delete the folder of a run with run_dir=False when it is over, however it ends."""
    try:
        yield
    finally:
        if job.folder and owns_folder(job.config, context):
            RunFolder(job.folder).discard()


def fit_in_job(context: DistributedContext, job: TrainJob) -> FitResult:
    """Train on this rank of an existing job; every rank returns the history of the first."""
    from paceline.train.loop import worker_jobs

    trained = worker_jobs.train(context, job)
    history = History.from_dict(context.broadcast(trained.history and trained.history.to_dict()))
    return FitResult(history, None, trained.stopped, _RESUME)


def tool_to_stay_for(config: TrainConfig) -> str | None:
    """Return the tool because of which a run stays in the caller's process, in words; None: it does not.

    Only where one worker would compute it all. Faults can be injected only into supervised workers, and more
    workers than one cannot be in one process: for them there is `profile=DIR`.
    """
    if config.workers == 1 and config.fault_tolerance.chaos is None:
        return watching_tool()
    if profiler_is_active():
        _log.warning(
            "the active torch.profiler sees nothing of the workers: fit(profile=DIR) has each write a trace"
        )
    return None


def fit_in_caller(job: TrainJob, tool: str) -> FitResult:
    """Train in this process, with the bits of a supervised run and without its protection.

    As with workers of their own the caller's module is trained as a copy, and its generators stay as they
    were. Nothing replaces this process if it ends: a run that is started again continues from a checkpoint.
    """
    from paceline.comm.context import DistributedContext
    from paceline.data.seeding import set_aside
    from paceline.train.loop import worker_jobs

    _log.warning(
        "%s, so this process trains by itself: breakpoints and profilers see it, and no worker is replaced. "
        "If the process ends, the run continues from its last checkpoint",
        tool,
    )
    with DistributedContext(1, 0) as context, default_group.offering(context), set_aside():
        trained = worker_jobs.train(context, _copied(job))
    assert trained.history is not None
    return FitResult(trained.history, trained.weights, trained.stopped, _RESUME, trained.averages)


def _copied(job: TrainJob) -> TrainJob:
    """Return the job with its own copy of all that training changes; observers stay the caller's."""
    modifiers = [one for one in job.callbacks if isinstance(one, Modifier)]
    parts = (job.model, job.objective, job.optimizer, modifiers)
    try:
        # In one go: an optimizer keeps the parameters of the model, and goes on doing so.
        model, objective, optimizer, changed = copy.deepcopy(parts)
    except Exception as error:
        raise UsageError(
            f"the model, the objective, the optimizer or a modifier cannot be copied: {error}",
            remedy="pass a function that builds the model, and keep locks, files and sockets out of it",
        ) from error
    copies = iter(changed)
    callbacks = [next(copies) if isinstance(one, Modifier) else one for one in job.callbacks]
    return dataclasses.replace(
        job,
        model=model,
        objective=objective,
        optimizer=optimizer,
        callbacks=callbacks,
        stop_file=None,
        process=None,
    )


def fit_supervised(job: TrainJob) -> FitResult:
    """Train under a supervisor, with the observers in this process."""
    signals: list[str] = []
    with ExitStack() as stack:
        observers = [stack.enter_context(progress_display())] if job.config.progress else []
        with _naming_part_of(job):
            running = stack.enter_context(SupervisedRun(job, observers))
        # A cluster that ends a job signals all of its processes, some of which pass the signal on.
        stack.enter_context(listening(signals.append, ctrl_c=True, same_seconds=SAME_SIGNAL_SECONDS))
        try:
            while not running.wait(_POLL_SECONDS):
                if signals:
                    running.stop(signals[0])
        except KeyboardInterrupt:
            raise interrupted(f"ended at once by a second Ctrl-C; {running.saved_sentence}") from None
        if running.stopped_before_it_began is not None:
            raise ending(running.stopped_before_it_began, None)
        trained = running.result()
        assert trained.history is not None
        stopped = signals[0] if signals else trained.stopped
        return FitResult(trained.history, trained.weights, stopped, running.saved_sentence, trained.averages)


def fit_spawned(job: TrainJob) -> FitResult:
    """Train on spawned ranks, without a supervisor."""
    assert job.folder is not None
    folder = RunFolder(job.folder)
    signals: list[str] = []

    def forward(reason: str) -> None:
        signals.append(reason)
        write_stop_file(folder.stop_file, reason)

    trained = train_spawned(job, listening(forward, ctrl_c=True))
    assert trained.history is not None
    if trained.stopped is None and signals:
        # The workers had ended when the signal came; its sender wants this process to end all the same.
        return FitResult(trained.history, trained.weights, signals[0], averages=trained.averages)
    return FitResult(trained.history, trained.weights, trained.stopped, _RESUME, trained.averages)


def train_spawned(job: TrainJob, stopping: AbstractContextManager[object]) -> TrainResult:
    """Train on spawned ranks, which look for the stop file after every step; the first failure ends them.

    `stopping` writes the stop file on request. It is entered once the file can only be this run's.
    """
    from paceline.train.loop import worker_jobs

    assert job.folder is not None
    folder = RunFolder(job.folder)
    # The lock first: without it the stop file may be that of another run in the folder.
    with held(folder.lock_file, str(folder.path)), ExitStack() as stack:
        # Removed before and after, so that it stops no other start.
        folder.stop_file.unlink(missing_ok=True)
        stack.callback(folder.stop_file.unlink, missing_ok=True)
        stack.enter_context(stopping)
        try:
            return spawn_ranks(worker_jobs.train, dataclasses.replace(job, stop_file=folder.stop_file))
        except PeerLostError as error:
            _record_lost(folder, error)
            raise


# The generators are the process's: two threads that build models would draw from each other's seed.
_building = threading.RLock()


def built(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the caller's module; building one leaves the caller's random generators as they were."""
    from torch import nn

    from paceline.data.seeding import set_aside
    from paceline.train.loop.process_setup import build_model

    if isinstance(model, nn.Module):
        return model
    with _building, set_aside():
        return build_model(model, seed)


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """Copy trained weights into the module, in place."""
    from paceline.train.state.model_state import model_tensors

    for name, tensor in model_tensors(module).items():
        tensor.copy_(weights[name])
    return module


def spawn_ranks(function: Callable[[DistributedContext, TrainJob], T], job: TrainJob) -> T:
    """Call a function of the training loop on spawned ranks; return the first rank's result."""
    config = job.config
    with _naming_part_of(job):
        results = spawn(
            function,
            job,
            workers=config.workers,
            threads=config.threads,
            comm_timeout=config.timeout,
            preload=PRELOAD,
        )
    return results[0]


def find_micro_batch(context: DistributedContext | None, job: TrainJob) -> int:
    """Search for a micro-batch that fits, in the job of `context` or on spawned ranks.

    The search leaves no trace, so it can begin again: for as many lost processes as a worker has in its
    budget, and once after an error that need not come again.
    """
    from paceline.train.loop import worker_jobs

    if context is not None:
        return worker_jobs.find_micro_batch(context, job)
    care = job.config.fault_tolerance
    lost = raised = 0
    while True:
        try:
            return spawn_ranks(worker_jobs.find_micro_batch, job)
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


def _record_lost(folder: RunFolder, error: PeerLostError) -> None:
    """Record the failure of a worker that was killed and could not do so itself."""
    rank, pid = error.rank, error.facts.get("pid")
    if rank is None or not isinstance(pid, int):
        return
    reason = error.message.splitlines()[0]
    # The error itself says more than the journal would.
    with suppress(PacelineError), Journal(folder.journal_file) as journal:
        journal.append(WorkerFailed(time=time.time(), rank=rank, pid=pid, phase="training", reason=reason))


@contextmanager
def _naming_part_of(job: TrainJob) -> Iterator[None]:
    """Replace an error about a job that cannot be sent by one that names the part of it."""
    try:
        yield
    except UsageError as error:
        if not str(error).startswith("argument 1 of "):
            raise
        raise _unsendable_part(job, error) from error.__cause__


def _unsendable_part(job: TrainJob, error: UsageError) -> UsageError:
    from paceline.data.read_errors import assigned_name

    if job.config.fault_tolerance.enabled:
        # Observers stay in this process.
        job = dataclasses.replace(job, callbacks=[one for one in job.callbacks if isinstance(one, Modifier)])
    for name, part in [(field.name, getattr(job, field.name)) for field in dataclasses.fields(job)]:
        try:
            os.close(memfd_pickle.dump(part, reducers=tensor_pickling.reducers()))
        except Exception as reason:
            what = f"the {name.replace('train', 'training data')}, of type {assigned_name(part)},"
            remedy = (
                "pass a function that builds the model"
                if name == "model"
                else "make it inside the function that uses it, and keep locks, files and sockets out of it"
            )
            return UsageError(
                f"{what} cannot be sent to the workers: {type(reason).__name__}: {reason}", remedy=remedy
            )
    return error
