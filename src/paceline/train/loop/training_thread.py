"""A training that runs in a thread of the caller: start, wait, stop, result, from any thread.

Synchronous training and asynchronous SGD derive from it. Imports no torch.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, final

from paceline.train.history import History
from paceline.train.state.run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

# Optimizers and deterministic kernels import torch's compiler, hundreds of modules: the fork server imports
# them once for all workers.
PRELOAD = ("paceline.train.loop.worker_jobs", "torch._inductor.config")


@final
@dataclass(frozen=True)
class TrainingOutcome:
    """Outcome of a training; `stopped` is why it ended early."""

    history: History
    weights: dict[str, Tensor]
    epochs_completed: int
    stopped: str | None = None
    staleness: dict[str, Any] = field(default_factory=dict)


class TrainingJob(ABC):
    """A training in progress, which ends with one outcome or one error. Every method may block."""

    def __init__(self, name: str, folder: RunFolder) -> None:
        self.folder = folder
        self._outcome: TrainingOutcome | None = None
        self._stop_reason: str | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _train(self) -> TrainingOutcome:
        """Run the training in the job's thread."""

    @abstractmethod
    def close(self) -> None:
        """End every process now; what was saved stays."""

    def _run(self) -> None:
        try:
            self._outcome = self._train()
        except Exception as error:
            self._error = error

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self, reason: str) -> None:
        """Ask the workers to finish the step, save and end."""
        self._stop_reason = self._stop_reason or reason

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether the training is over, after at most `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> TrainingOutcome:
        """Return the outcome after `wait`, or raise the error that ended the training."""
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome
