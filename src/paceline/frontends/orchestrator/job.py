"""A training that runs beside the event loop: started, waited for, stopped and ended from any thread.

    Job            what the orchestrator needs of one
    SyncJob        synchronous strategies: the training loop on workers that meet after every step

Must not know asyncio. Nothing here is called from the thread of an event loop: everything may wait.
"""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, final

from torch import Tensor

from paceline.frontends import supervised
from paceline.frontends.orchestrator import pulses
from paceline.frontends.orchestrator.nodes import Pulse
from paceline.frontends.spawn import spawn
from paceline.train.history import History
from paceline.train.run_folder import RunFolder
from paceline.train.run_lock import held
from paceline.train.signals import leave_request
from paceline.train.worker import Trained, TrainJob, train

# Imported once by the fork server, for all workers.
PRELOAD = ("paceline.train.worker", "torch._inductor.config")
_LOOK_SECONDS = 0.05


@final
@dataclass(frozen=True)
class Outcome:
    """What became of a training; `stopped` is why it ended before its time."""

    history: History
    weights: dict[str, Tensor]
    epochs_completed: int
    stopped: str | None = None
    staleness: dict[str, Any] = field(default_factory=dict)


class Job(Protocol):
    """A training under way. `wait` and `result` may be called again; `close` ends what is left, at once.

    `pulses` is what is measured of each worker by itself; nothing where nobody does, or not at the moment.
    """

    @property
    def folder(self) -> RunFolder: ...

    def wait(self, timeout: float | None = None) -> bool: ...

    def result(self) -> Outcome: ...

    def pulses(self) -> tuple[Pulse, ...]: ...

    def stop(self, reason: str) -> None: ...

    def close(self) -> None: ...


class InThread(ABC):
    """A training whose caller's side runs in a thread of its own, to one outcome or one error."""

    def __init__(self, name: str) -> None:
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """Sets the outcome or the error; never raises."""

    def start(self) -> Self:
        self._thread.start()
        return self

    def wait(self, timeout: float | None = None) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def pulses(self) -> tuple[Pulse, ...]:
        return ()

    def result(self) -> Outcome:
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome


@final
class SyncJob(InThread):
    """The workers of one synchronous training."""

    def __init__(self, job: TrainJob) -> None:
        super().__init__("paceline-job")
        assert job.folder is not None
        self.folder = RunFolder(job.folder)
        self._job = dataclasses.replace(job, stop_file=self.folder.stop_file)
        self._stop: str | None = None
        self._closing = False

    def pulses(self) -> tuple[Pulse, ...]:
        return pulses.take(self.folder.path)

    def stop(self, reason: str) -> None:
        """Finish the step, save, end."""
        self._stop = self._stop or reason
        if not self._job.config.fault_tolerance.enabled:
            leave_request(self.folder.stop_file, reason)

    def close(self) -> None:
        """End everything now; what was saved stays."""
        self._closing = True
        if self._thread.is_alive():
            self.stop("the orchestrator was closed")
            self._thread.join()

    def _run(self) -> None:
        try:
            looked_after = self._job.config.fault_tolerance.enabled
            trained = self._looked_after() if looked_after else self._alone()
            history = trained.history
            assert history is not None
            self._outcome = Outcome(history, trained.weights, len(history.epochs), trained.stopped)
        except Exception as error:
            self._error = error

    def _looked_after(self) -> Trained:
        """A supervisor replaces workers that fail."""
        with supervised.start(dataclasses.replace(self._job, stop_file=None)) as running:
            told = killed = False
            while not running.wait(_LOOK_SECONDS):
                if self._closing and not killed:
                    killed = True
                    running.kill()
                elif self._stop is not None and not told:
                    told = True
                    running.stop(self._stop)
            return running.result()

    def _alone(self) -> Trained:
        """The first failure ends the job."""
        config = self._job.config
        with held(self.folder.lock_file, str(self.folder.path)):
            self.folder.stop_file.unlink(missing_ok=True)
            try:
                results = spawn(
                    train,
                    self._job,
                    workers=config.workers,
                    threads=config.threads,
                    comm_timeout=config.timeout,
                    preload=PRELOAD,
                )
            finally:
                self.folder.stop_file.unlink(missing_ok=True)
        return results[0]
