"""The workers of one synchronous training, run from a thread beside the event loop, and how fast each is."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from paceline.control.messages import ToolRequest
from paceline.control.run_status import RunStatus, WorkerFacts
from paceline.core.errors import PacelineError, UsageError
from paceline.elastic.supervisor import tool_client
from paceline.frontends.fit_drivers import train_spawned
from paceline.frontends.supervised_run import SupervisedRun
from paceline.train.history import History
from paceline.train.loop.training_thread import TrainingJob, TrainingOutcome
from paceline.train.loop.worker_jobs import TrainJob, TrainResult
from paceline.train.state.run_folder import RunFolder
from paceline.train.stop_signals import Stopped, write_stop_file

_POLL_SECONDS: Final = 0.05
# For connecting, authenticating and the answer: a supervisor on the same host takes milliseconds.
_ASK_SECONDS: Final = 1.0


@final
class SyncJob(TrainingJob):
    """Runs the training loop on workers that meet after every step."""

    def __init__(self, job: TrainJob) -> None:
        assert job.folder is not None
        super().__init__("paceline-job", RunFolder(job.folder))
        self._job = job
        self._supervised = job.config.fault_tolerance.enabled
        self._closing = False

    def stop(self, reason: str) -> None:
        super().stop(reason)
        if not self._supervised:
            write_stop_file(self.folder.stop_file, reason)

    def close(self) -> None:
        self._closing = True
        if self._thread.is_alive():
            self.stop("the orchestrator was closed")
            self._thread.join()

    def _train(self) -> TrainingOutcome:
        try:
            trained = (
                self._train_supervised()
                if self._supervised
                else train_spawned(self._job, self._stop_file_is_ours())
            )
        except Stopped as stopped:
            # No worker was there to return a result. What was saved before is there.
            nothing = History(
                total_time=0.0, state_hash="", run_dir=str(self.folder.path), stopped=stopped.reason
            )
            return TrainingOutcome(nothing, {}, 0, stopped.reason)
        history = trained.history
        assert history is not None
        return TrainingOutcome(history, trained.weights, len(history.epochs), trained.stopped)

    def _train_supervised(self) -> TrainResult:
        """Train under a supervisor, which replaces workers that fail."""
        with SupervisedRun(self._job) as running:
            while not running.wait(_POLL_SECONDS):
                if self._closing:
                    running.kill()
                elif self._stop_reason is not None:
                    running.stop(self._stop_reason)
            return running.result()

    @contextmanager
    def _stop_file_is_ours(self) -> Iterator[None]:
        """Repeat a stop that was requested before the run had its lock: its stop file is removed by then."""
        if self._stop_reason is not None:
            write_stop_file(self.folder.stop_file, self._stop_reason)
        yield


def request_workers(folder: Path, workers: int) -> None:
    """Ask the run's supervisor for another number of workers."""
    answer = tool_client.ask(folder, ToolRequest(what="scale", number=workers))
    if not answer.done:
        raise UsageError(answer.text, remedy="see `paceline status` for what the run is doing")


def measurements(folder: Path) -> tuple[float, Sequence[WorkerFacts]]:
    """Ask the run's supervisor what it has measured of each worker; return the time and the workers.

    No worker if none answers: a supervisor that starts, restarts or ends is not a failure of the training.
    """
    try:
        facts = tool_client.ask(folder, ToolRequest(what="status"), _ASK_SECONDS).facts
        return time.time(), RunStatus.from_plain(facts).workers
    except (PacelineError, OSError):
        return 0.0, ()
