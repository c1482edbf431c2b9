"""A run whose loop is another framework's: folder, lock, journal, verified checkpoints, trackers and history.

The loop calls this in one process of its job, the chief: the first rank, whichever process that is now. What
happens to the numbers between two calls is the framework's; what is recorded, and when a version is due, is
decided here, by the same parts that Paceline's own loop uses.

    with FrameworkRun.open(config, "horovod 0.28.1", callbacks) as run:
        if run.resumed is not None: ...                  # load its tensors, go on at run.position
        run.start(workers, contents)
        run.step(...) ... run.evaluated(...) ... run.end_epoch()
        history = run.finish(state_hash)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, final

import torch

from paceline.checkpoint.loader import Checkpoint
from paceline.core import events, journal
from paceline.core.errors import UsageError
from paceline.core.wording import counted, ranks as rank_names
from paceline.data.batch_plan import DataPosition
from paceline.frontends.framework_trainers.framework_checkpoints import FrameworkCheckpoints, StateContents
from paceline.frontends.run_preparation import prepare
from paceline.monitor.journal_history import history_of
from paceline.train.callbacks import Callbacks, Modifier, Observer, RunInfo
from paceline.train.history import History
from paceline.train.host_fingerprint import fingerprint
from paceline.train.settings.train_config import TrainConfig, definition
from paceline.train.state import run_lock
from paceline.train.state.checkpointing import TRAIN_LOSS
from paceline.train.state.recorder import EpochSums, PendingStep, Recorder
from paceline.train.state.run_folder import RunFolder

_CPU = torch.device("cpu")


@final
@dataclass(frozen=True)
class FrameworkWorker:
    """A process of the framework's job."""

    rank: int
    pid: int
    host: str


@final
@dataclass(frozen=True)
class WorkerLoss:
    """What is known of a lost worker: what it was doing, what became of it, what the others waited for and
    what is done about it."""

    phase: str
    reason: str
    waiting: str
    action: str

    def events(self, worker: FrameworkWorker, step: int) -> list[events.Event]:
        """Return the lines of the journal, the last with all of it as a sentence."""
        where: dict[str, Any] = {
            "rank": worker.rank,
            "pid": worker.pid,
            "host": worker.host,
            "phase": self.phase,
        }
        text = (
            f"rank {worker.rank} (process {worker.pid} on {worker.host}) {self.reason} in {self.phase}, step "
            f"{step}; {self.waiting}; {self.action}"
        )
        return [
            events.WorkerFailed(time=time.time(), reason=self.reason, cause="crash", **where),
            events.Verdict(
                time=time.time(), line="", waiting=self.waiting, action=self.action, text=text, **where
            ),
        ]


@final
class FrameworkRun:
    """The chief's record of a run; made by `open`, closed by `with`."""

    def __init__(self, config: TrainConfig, folder: RunFolder, framework: str, callbacks: Callbacks) -> None:
        self.config, self.folder, self.framework = config, folder, framework
        self.position = DataPosition()
        self.stopped: str | None = None
        self.workers: tuple[FrameworkWorker, ...] = ()  # that train now
        self._callbacks, self._closing = callbacks, ExitStack()
        self._started, self._is_started, self._is_over = time.perf_counter(), False, False
        self._lost_at: float | None = None
        self._lost: list[int] = []
        self._repairs = 0
        self._versions: FrameworkCheckpoints | None = None
        self._journal: journal.PatientJournal | None = None
        self._recorder = Recorder(callbacks, self._tell, _CPU, at_nonfinite="")

    # -- beginning

    @staticmethod
    def open(
        config: TrainConfig, framework: str, callbacks: Iterable[Observer | Modifier] = ()
    ) -> FrameworkRun:
        """Make the folder that `config` names, or open the one to resume in; find the version to go on from,
        verified byte by byte. After `paceline run` has started all ranks again, that is the run's own."""
        chosen = Callbacks(callbacks)
        if chosen.modifiers:
            raise UsageError(
                f"{type(chosen.modifiers[0]).__name__} changes training, and the loop is the framework's",
                remedy="give observers and trackers alone, or use paceline.Trainer",
            )
        settled, folder = prepare(config, None)
        run = FrameworkRun(settled, folder, framework, chosen)
        try:
            run._enter(settled.resume)
        except BaseException:
            run.close()
            raise
        return run

    @staticmethod
    def take_over(
        folder: str,
        config: TrainConfig,
        framework: str,
        callbacks: Iterable[Observer | Modifier],
        position: DataPosition,
    ) -> FrameworkRun:
        """Continue the record of a chief that was lost, from the position that the survivors have."""
        run = FrameworkRun(config, RunFolder.open(folder), framework, Callbacks(callbacks))
        try:
            run._enter(None)
        except BaseException:
            run.close()
            raise
        run.position = position
        return run

    def start(
        self,
        workers: Sequence[FrameworkWorker],
        contents: StateContents,
        *,
        replicas: int | None = None,
        samples: int | None = None,
        total_steps: int | None = None,
        continued: bool = False,
    ) -> None:
        """Write the first lines of this start. `replicas`: that train, where a process has several of them;
        `continued`: another process had begun it, and was lost."""
        count = replicas or len(workers)
        self.workers = tuple(workers)
        if self._versions is not None:
            self._versions.contents = contents
        parent = None if self.resumed is None else self.resumed.version
        if parent is None and not continued:
            about = definition(self.config) | {"framework": self.framework}
            self._tell(
                events.RunStarted(
                    time=time.time(),
                    workers=count,
                    shards=count,
                    samples=samples,
                    definition=about,
                    fingerprint=fingerprint(_CPU, torch.get_num_threads()),
                )
            )
        else:
            self._go_back(parent or 0)
        for one in workers:
            self._tell(events.WorkerStarted(time=time.time(), rank=one.rank, pid=one.pid, host=one.host))
        self._is_started = True
        self._callbacks.notify(
            Observer.on_start,
            RunInfo(
                config=self.config,
                workers=count,
                total_steps=total_steps,
                samples=samples,
                first_step=self.position.step,
                first_epoch=self.position.epoch,
                run_dir=self.run_dir,
            ),
        )
        self._recorder.start_clock()

    @property
    def resumed(self) -> Checkpoint | None:
        """The version that this start goes on from, verified."""
        return None if self._versions is None else self._versions.resumed

    @property
    def run_dir(self) -> str | None:
        """The run's folder; None for a run that keeps nothing."""
        return None if self.config.run_dir is False else str(self.folder.path)

    # -- recording

    def step(
        self,
        *,
        loss: float,
        samples: int,
        learning_rate: float = 0.0,
        metrics: Mapping[str, float] | None = None,
        taken: int | None = None,
    ) -> None:
        """Record a step that was applied on all workers; begin a version where one is due. `taken`: positions
        of the epoch that it used; None: as many as samples."""
        measured = dict(metrics or {})
        used = samples if taken is None else taken
        before, self.position = self.position, self.position.after(used, samples)
        event = events.StepCommitted(
            time=0.0,
            step=self.position.step,
            epoch=before.epoch,
            loss=loss,
            samples=samples,
            offset=before.offset,
            taken=used,
            learning_rate=learning_rate,
        )
        numbers = torch.tensor([loss, *measured.values()], dtype=torch.float64)
        self._recorder.commit(PendingStep(event, numbers, has_norm=False, names=tuple(measured)))
        self._note_repair()
        if self._versions is not None:
            self._versions.after_step(self.position, self._version_metrics())

    def evaluated(self, metrics: Mapping[str, float], samples: int, seconds: float) -> None:
        """Record the model's figures on validation data, after the last step."""
        self._recorder.evaluated(
            events.Evaluated(
                time=time.time(),
                step=self.position.step,
                epoch=self.position.epoch_of_last_step,
                samples=samples,
                metrics=dict(metrics),
                seconds=seconds,
            )
        )

    def end_epoch(self) -> None:
        """Record the end of a pass over the data, after its evaluation; begin a version where one is due."""
        epoch, recorder = self.position.epoch, self._recorder
        here = recorder.evaluations[-1:]
        validation = here[0].metrics if here and here[0].step == self.position.step else {}
        recorder.end_epoch(epoch, dict(validation))
        self.position = self.position.next_epoch()
        if self._versions is not None:
            known = recorder.evaluations if validation else ()
            self._versions.after_epoch(self.position, self._version_metrics(), known)
        recorder.start_clock()

    def start_clock(self) -> None:
        """Count the next step's seconds from now: what came before it was no part of it."""
        self._recorder.start_clock()

    # -- losses of workers

    def lost(
        self, workers: Iterable[FrameworkWorker], loss: WorkerLoss, noticed: float | None = None
    ) -> None:
        """Record workers that are gone; without one, as when workers only joined, there is nothing to repair.
        `noticed`: when that was seen, on time.perf_counter; None: now."""
        gone = list(workers)
        if not gone:
            return
        self._lost_at = self._lost_at or noticed or time.perf_counter()
        for one in gone:
            self._lost.append(one.rank)
            for event in loss.events(one, self.position.step + 1):
                self._tell(event)

    def regroup(self, position: DataPosition, workers: Sequence[FrameworkWorker]) -> None:
        """Go on from a position that the workers hold in memory, with these workers."""
        known = {(one.host, one.pid) for one in self.workers}
        self.position, self.workers = position, tuple(workers)
        self._go_back(0 if self._versions is None else self._versions.newest or 0)
        for one in workers:
            if (one.host, one.pid) not in known:
                self._tell(events.WorkerStarted(time=time.time(), rank=one.rank, pid=one.pid, host=one.host))
        self._callbacks.notify(Observer.on_workers, len(workers))
        self._recorder.start_clock()

    def note(self, text: str) -> None:
        """Write a sentence for people to the journal."""
        self._tell(events.Note(time=time.time(), text=text))

    # -- the end

    def finish(self, state_hash: str) -> History:
        """Save the last state, write the last line, and return the history of all starts of the run."""
        if self._versions is not None:
            is_stopped = self.stopped is not None
            self._versions.finish(self.position, self._version_metrics(), is_stopped=is_stopped)
        self._tell(
            events.RunEnded(
                time=time.time(),
                step=self.position.step,
                epoch=self.position.epoch_of_last_step,
                reason=self.stopped or "finished",
                hash=state_hash,
            )
        )
        self._is_over = True
        recorder = self._recorder
        unfinished = recorder.sums.record(self.position.epoch, {}) if recorder.sums.samples else None
        history = dataclasses.replace(
            history_of(journal.iterate(self.folder.journal_file), self.run_dir),
            total_time=time.perf_counter() - self._started,
            unfinished=unfinished,
        )
        self._callbacks.notify(Observer.on_end, history)
        return history

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Give the folder back. Without `finish` the run has failed, which journal and trackers are told."""
        if self._is_started and not self._is_over:
            self._is_over = True
            if self._versions is not None:
                self._versions.settle()
            reason = "its process ended" if error is None else f"{type(error).__name__}: {error}"
            first = reason.splitlines()[0]
            self._tell(events.RunFailed(time=time.time(), step=self.position.step, reason=first))
            self._callbacks.failed(error)
        self._closing.close()

    def abandon(self) -> None:
        """Give the folder back to another process, which continues this record: this one is no longer the
        chief."""
        self._is_over = True
        self._callbacks.failed(None)
        self._closing.close()

    # inside

    def _enter(self, which: str | int | None) -> None:
        config, folder = self.config, self.folder
        if config.run_dir is False:
            self._closing.callback(folder.discard)
        self._closing.enter_context(run_lock.held(folder.lock_file, f"the folder {folder.path}"))
        # After the lock: only its holder writes to the file.
        self._journal = journal.PatientJournal(journal.Journal(folder.journal_file), alone=True)
        self._closing.callback(self._journal.close)
        if config.checkpoint.enabled:
            told = partial(self._callbacks.notify, Observer.on_checkpoint)
            self._versions = FrameworkCheckpoints(config, folder, self.framework, self._tell, told)
            self._closing.callback(self._versions.close)
            if which is not None:
                self._versions.resume(which)
            self.position = self._versions.position

    def _version_metrics(self) -> dict[str, float]:
        recorder = self._recorder
        here = recorder.evaluations[-1:]
        found = dict(here[0].metrics) if here and here[0].step == self.position.step else {}
        if recorder.steps and (not found or self.config.checkpoint.metric == TRAIN_LOSS):
            found[TRAIN_LOSS] = recorder.steps[-1].loss
        return found

    def _go_back(self, version: int) -> None:
        """Record that steps after the position are done again, and recall those before it."""
        position, recorder = self.position, self._recorder
        self._tell(
            events.RunResumed(
                time=time.time(),
                version=version,
                step=position.step,
                epoch=position.epoch,
                workers=len(self.workers),
            )
        )
        past = history_of(journal.iterate(self.folder.journal_file))
        recorder.steps.forget_from(position.step + 1)
        recorder.epochs, recorder.evaluations = list(past.epochs), list(past.evaluations)
        recorder.sums = EpochSums()
        for record in past.steps:
            if record.epoch == position.epoch:
                recorder.sums.add(record)

    def _note_repair(self) -> None:
        if self._lost_at is None:
            return
        seconds, lost = time.perf_counter() - self._lost_at, self._lost
        self._lost_at, self._lost, self._repairs = None, [], self._repairs + 1
        self._tell(
            events.Repaired(time=time.time(), generation=self._repairs, seconds=seconds, lost=sorted(lost))
        )
        self.note(
            f"training goes on with {counted(len(self.workers), 'worker')} {seconds:.2f} s after "
            f"{rank_names(lost, 'was', 'were')} lost"
        )

    def _tell(self, event: events.Event) -> None:
        if self._journal is not None:
            self._journal.append(event)
