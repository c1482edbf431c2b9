"""A supervised training run on the side of its caller: start, wait, stop, result.

Joins the control plane (elastic/), which keeps workers alive, to the workers' training (train/). Observers
run here, in the caller's process. Must not import torch: a process that only waits never needs it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, final

from paceline.comm import tensor_pickling
from paceline.comm.cost import load_links
from paceline.control import supervisor_address
from paceline.control.worker_options import WORKER_PRELOAD, WorkerOptions
from paceline.core import events, fd_messages, journal, metric_reports
from paceline.core.available_resources import visible_gpus
from paceline.core.chaos_spec import Chaos
from paceline.core.errors import PeerLostError
from paceline.core.listen_address import ListenAddress
from paceline.core.tls import Tls
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.supervisor.parent_messages import JobOutcome, SupervisedJob
from paceline.elastic.supervisor.supervisor_launcher import SupervisorLauncher
from paceline.engines.engine import Engine
from paceline.engines.local import rank_call
from paceline.engines.local.blame import RankRaised, root_cause
from paceline.frontends.engine_nodes import EngineNodes, supervisor_bind
from paceline.train.callbacks import Callbacks, Modifier, Observer, RunInfo, SavedCheckpoint
from paceline.train.history import EpochRecord, Evaluation, StepLog, StepRecord, earlier_steps
from paceline.train.settings.schedule import total_steps
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_lock import held
from paceline.train.stop_signals import NOTHING_KEPT, Stopped, saved_sentence

if TYPE_CHECKING:
    from paceline.train.loop.worker_jobs import TrainJob, TrainResult

_log = logging.getLogger(__name__)

_ENTRY = "paceline.frontends.rank_main:member_main"
_LOOK_SECONDS = 0.25
_READ_BYTES = 1 << 20
_UNWATCHED_SECONDS = 1.0  # between two reads of the journal where there are no observers


@final
class JournalObservers:
    """Reads what was appended to a journal and calls the observers, in order.

    In the caller's process: workers come and go, but the state of an observer is there after the run.
    """

    def __init__(self, file: Path, callbacks: Callbacks, info: RunInfo, url: str) -> None:
        self._file = file
        self._callbacks = callbacks
        self._info = info
        self._url = url
        self.started = False  # the run has begun or was resumed
        self.first_step = 0  # that it was resumed from
        # Earlier events belong to earlier starts of the run; observers see those of this one.
        self._offset = file.stat().st_size if file.exists() else 0
        self.steps = StepLog()
        self.saved: tuple[int, int] | None = None  # the newest known version, and its step
        self.workers = info.workers
        self.ranks: set[int] = set()
        self.injected: set[int] = set()  # faults that were injected, by their index in the chaos

    def mute(self) -> None:
        """Stop calling observers; the journal is still read."""
        self._callbacks = Callbacks([])

    def read(self) -> None:
        """Read new events and call the observers."""
        while self._file.exists() and self._file.stat().st_size > self._offset:
            chunk = journal.read(self._file, self._offset, max_bytes=_READ_BYTES)
            for event in chunk.events:
                self._dispatch(event)
            if chunk.offset == self._offset:
                return
            self._offset = chunk.offset

    def _dispatch(self, event: events.Event) -> None:
        callbacks = self._callbacks
        if isinstance(event, events.StepCommitted):
            record = StepRecord.of(event)
            # After a job has lost all its workers, steps are repeated from a checkpoint on.
            if self.steps.put(record):
                callbacks.notify(Observer.on_step, record)
        elif isinstance(event, events.RunStarted | events.RunResumed):
            info = dataclasses.replace(self._info, workers=event.workers)
            if isinstance(event, events.RunResumed):
                self.saved = event.version, event.step
                info = dataclasses.replace(info, first_step=event.step, first_epoch=event.epoch)
            if not self.started:  # else the job lost all its workers, and continues from a checkpoint
                self.started, self.first_step = True, info.first_step
                callbacks.notify(Observer.on_start, info)
        elif isinstance(event, events.Evaluated):
            callbacks.notify(Observer.on_evaluation, Evaluation.of(event))
        elif isinstance(event, events.MetricReported):
            callbacks.notify(Observer.on_metric, event)
            metric_reports.pass_to_sinks(event)
        elif isinstance(event, events.EpochEnded):
            callbacks.notify(Observer.on_epoch, EpochRecord.of(event))
        elif isinstance(event, events.CheckpointSaved):
            self.saved = event.version, event.step
            callbacks.notify(Observer.on_checkpoint, SavedCheckpoint.of(event, url=self._url))
        elif isinstance(event, events.WorkerStarted):
            self.ranks.add(event.rank)
        elif isinstance(event, events.FaultInjected):
            self.injected.add(event.index)
        elif isinstance(event, events.ViewChanged):
            before, self.workers = self.workers, len(event.members)
            if self.started and before != self.workers:
                callbacks.notify(Observer.on_workers, self.workers)


@final
class SupervisedRun:
    """A run under way: starts the workers of a job whose config is resolved, in its folder. To be closed. Use
    it from one thread, but for `stop` and `kill`."""

    def __init__(self, job: TrainJob, observers: Sequence[Observer] = ()) -> None:
        from paceline.train.loop.run_builder import local_place

        assert job.folder is not None
        config = job.config
        self.folder = RunFolder(job.folder)
        self._closing = ExitStack()
        self._outcome: JobOutcome | None = None
        self._raised: Exception | None = None  # by an observer
        self._read_at = 0.0
        self._started = time.perf_counter()
        self._job = job
        self._trained: TrainResult | None = None
        self._starts = 0
        self._stopping = self._killed = False
        self._ended = False  # the observers know the end
        self._failure: BaseException | None = None
        self._nodes: EngineNodes | None = None
        watching = [*(item for item in job.callbacks if isinstance(item, Observer)), *observers]
        self._callbacks = Callbacks(watching)
        try:
            self._closing.enter_context(held(self.folder.lock_file, str(self.folder.path)))
            place = local_place(self.folder, config)
            if place is not None:
                self._closing.enter_context(held(place / ".run", f"checkpoint.url={str(place)!r}"))
            self._following = JournalObservers(
                self.folder.journal_file,
                self._callbacks,
                _info(config, job),
                self.folder.checkpoint_url(config),
            )
            self._launch(job)
        except BaseException:
            self._closing.close()
            raise

    def _launch(self, job: TrainJob) -> None:
        from paceline.train.member.member_training import train_member

        modifiers = tuple(item for item in job.callbacks if isinstance(item, Modifier))
        sent = dataclasses.replace(job, callbacks=modifiers)
        packed, self._call = rank_call.pack(train_member, (sent,), tensor_pickling.reducers())
        self._closing.callback(os.close, packed)
        self._starts += 1
        self._supervised = SupervisorLauncher(_job(job.config, self.folder), packed)
        self._closing.callback(self._supervised.close)
        self._supervised.start()
        if isinstance(job.config.engine, Engine):
            # Closed before the supervisor is: agents that end must not be replaced.
            self._nodes = EngineNodes(job.config, self._supervised, self.folder.path)
            self._closing.callback(self._nodes.close)
            self._nodes.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for at most `timeout` seconds, and call the observers; return whether the run is over."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left = _LOOK_SECONDS if until is None else min(_LOOK_SECONDS, until - time.monotonic())
            self._outcome = self._supervised.wait(max(0.0, left))
            if self._nodes is not None:
                self._nodes.look(self._outcome)
            if self._outcome is not None:
                self._take(self._outcome)
            now = time.monotonic()
            if self._callbacks.observers or self._outcome is not None or now >= self._read_at:
                self._follow()
                self._read_at = now + _UNWATCHED_SECONDS
            if until is not None and time.monotonic() >= until:
                break
        return self._outcome is not None

    def _take(self, outcome: JobOutcome) -> None:
        """Unpack the result. Start again where the run came to its end and no worker was left to send it."""
        self._closing.callback(fd_messages.close_all, outcome.descriptors)
        if outcome.ok and outcome.result is not None:
            self._trained = rank_call.unpack_result(outcome.result, self._call, outcome.rank or 0)
        known = self._trained is not None and self._trained.history is not None
        if outcome.ok and outcome.stopped is None and not known and self._starts == 1:
            self._start_again()

    def _start_again(self) -> None:
        """Have new workers load the run's last checkpoint and send the result from there: that the workers
        were killed after the last step must leave no trace either."""
        _log.warning("the workers were lost before they had sent the result: it is fetched from a checkpoint")
        care = dataclasses.replace(self._job.config.fault_tolerance, chaos=None)
        config = dataclasses.replace(self._job.config, resume="auto", fault_tolerance=care)
        self._outcome = None
        self._supervised.close()
        self._launch(dataclasses.replace(self._job, config=config))

    def _follow(self) -> None:
        """Call the observers with what is new in the journal. One that raises ends the run, after a save."""
        try:
            self._following.read()
        except Exception as error:
            self._raised = self._raised or error
            self._following.mute()
            self._supervised.stop(f"an observer raised {type(error).__name__}")
            self._following.read()

    def stop(self, reason: str) -> None:
        """Finish the step, save, and end. Only the first call counts."""
        if not self._stopping:
            self._stopping = True
            self._supervised.stop(reason)

    def kill(self) -> None:
        """End everything at once. Only the first call counts."""
        if not self._killed:
            self._killed = True
            self._supervised.kill()

    @property
    def stopped_before_it_began(self) -> str | None:
        """The reason of a stop that came so early that there is no result; after `wait`."""
        outcome = self._outcome
        assert outcome is not None
        return outcome.stopped if outcome.ok and outcome.result is None else None

    def result(self) -> TrainResult:
        """Return the result of the run, after `wait`; raise the error that ended it."""
        outcome = self._outcome
        assert outcome is not None
        if not outcome.ok:
            self._failure = self._error(outcome)
            raise self._failure
        if self._raised is not None:
            self._failure = self._raised
            self._raised.add_note(self.saved_sentence)
            raise self._raised
        trained = self._trained
        if trained is None or trained.history is None:
            if outcome.stopped is not None:
                # Between two views, or the workers were lost after they had saved: what was saved is there.
                raise Stopped(outcome.stopped, None)
            raise PeerLostError(
                f"the run ended ({outcome.reason}), and the workers with its result were lost after it",
                remedy=f"its last checkpoint holds the weights: paceline checkpoint ls {self.folder.path}",
            )
        first = self._following.first_step
        earlier = earlier_steps(self.folder.journal_file, first) if first else []
        steps = {one.step: one for one in (*earlier, *trained.history.steps, *self._following.steps)}
        history = dataclasses.replace(
            trained.history,
            steps=tuple(steps[step] for step in sorted(steps)),
            total_time=time.perf_counter() - self._started,
            workers=self._following.workers,
        )
        self._ended = True
        self._callbacks.notify(Observer.on_end, history)
        self._warn_of_chaos(max(steps, default=0))
        return dataclasses.replace(trained, history=history)

    def close(self) -> None:
        """End what still runs; nothing is left behind."""
        self._closing.close()
        if self._following.started and not self._ended:
            self._ended = True
            self._callbacks.failed(self._failure)
        for page in self.folder.logs.glob("phase-*"):
            page.unlink(missing_ok=True)  # of workers that were killed

    def __enter__(self) -> SupervisedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def saved_sentence(self) -> str:
        """A sentence for errors: which version a run that is started again resumes from."""
        if self._job.config.run_dir is False:
            return NOTHING_KEPT
        if self._following.saved is not None:
            return saved_sentence(*self._following.saved)
        if not self._job.config.checkpoint.enabled:
            return "nothing is saved, because checkpoints are turned off"
        if self._job.config.resume is not None and not self._following.started:
            return "the run did not continue: what was saved before this start is as it was"
        return "no version is saved: a run that is started again begins anew"

    def _warn_of_chaos(self, last_step: int) -> None:
        """Warn about faults that were not injected: a test that tested nothing must not look passed."""
        chaos = Chaos(self._job.config.fault_tolerance.chaos or "")
        unmet = chaos.unmet(self._following.injected, self._following.ranks, last_step)
        if unmet:
            _log.warning("chaos: these faults never came in this run: %s", "; ".join(unmet))

    def _error(self, outcome: JobOutcome) -> BaseException:
        if outcome.failure is not None:
            rank, pid = outcome.rank or 0, outcome.pid or 0
            raised = root_cause([RankRaised.load(rank, pid, 0.0, outcome.failure, self._call.classes)])
            raised.add_note(self.saved_sentence)
            return raised
        return PeerLostError(
            outcome.text or outcome.reason,
            rank=outcome.rank,
            remedy=f"the run's journal and logs/ say more; {self.saved_sentence}",
            pid=outcome.pid,
        )


def _job(config: TrainConfig, folder: RunFolder) -> SupervisedJob:
    care, on_engine = config.fault_tolerance, isinstance(config.engine, Engine)
    from_agents = config.workers if on_engine else care.joining_workers
    tls = None
    if care.certificate and care.key and care.authority:
        tls = Tls(Path(care.certificate), Path(care.key), Path(care.authority))
    settings = MachineSettings(
        workers=config.workers,
        shards=config.chosen_shards,
        agent_workers=from_agents,
        agents_wait_seconds=care.node_wait,
        min_workers=care.min_workers,
        # Where bits may differ, each worker is one slice of the batch, however many there are.
        most_workers=config.chosen_shards if config.mode == "exact" else 0,
        max_worker_failures=care.max_worker_failures,
        max_preemptions=care.max_preemptions,
        backoff=care.backoff,
        seed=config.seed,
        heartbeat=care.heartbeat,
        stragglers=care.stragglers,
        saves_on_failure=config.checkpoint.enabled,
    )
    options = WorkerOptions(
        exact=config.mode == "exact",
        patience=care.patience,
        chaos=care.chaos,
        # Read once, here: ranks that chose algorithms by different links would disagree.
        links=load_links().to_plain(),
        tls=tls,
        returns_from_agents=from_agents == config.workers,
    )
    return SupervisedJob(
        entry=_ENTRY,
        preload=WORKER_PRELOAD,
        settings=settings,
        folder=folder.path,
        threads=config.threads,
        options=options,
        bind=supervisor_bind(config),
        secret=None if care.token_file is None else supervisor_address.read_token(Path(care.token_file)),
        port=care.port,
        listening=ListenAddress(care.ports or "", care.interface or ""),
    )


def _info(config: TrainConfig, job: TrainJob) -> RunInfo:
    samples = getattr(job.train, "size", None)
    return RunInfo(
        config=config,
        workers=config.workers,
        total_steps=total_steps(config, samples),
        samples=samples,
        run_dir=None if config.run_dir is False else str(job.folder),
        device=device_of_workers(config.device, visible_gpus(), _torch_has_cuda()),
    )


def device_of_workers(wanted: str, gpus: int, has_cuda: bool) -> str:
    """Return the kind of device that the workers will choose, as far as their caller can tell without a
    driver: `gpus` are those that this host shows, `has_cuda` whether torch is built for them."""
    return "cuda" if wanted == "cuda" or (wanted == "auto" and gpus > 0 and has_cuda) else "cpu"


def _torch_has_cuda() -> bool:
    """Return whether torch is built for CUDA; assumed where the caller has not imported it."""
    torch = sys.modules.get("torch")
    return torch is None or torch.version.cuda is not None
