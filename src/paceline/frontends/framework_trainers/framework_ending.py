"""When a run on another framework ends, and what its history says of that: one rule for the loops of all.

A run ends with its last epoch, or with its step `max_steps`: both are its end, and `History.stopped` is None.
A signal that asks a process to stop travels with a step's figures, so that all processes end after the same
step; the run is saved, its history has the reason, and `fit` raises it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

from paceline.data.batch_plan import DataPosition
from paceline.frontends.framework_trainers.framework_run import FrameworkRun
from paceline.train.history import History
from paceline.train.settings.train_config import TrainConfig
from paceline.train.stop_signals import OTHER_RANK, SAME_SIGNAL_SECONDS, StopRequest, ending, listening


@final
class RunEnding:
    """The end of one `fit` in one process. `is_stopping`: all processes have agreed to end after this step,
    because one of them was asked to."""

    def __init__(self, config: TrainConfig) -> None:
        self._epochs, self._most = config.epochs, config.max_steps
        self._request = StopRequest()
        self.is_stopping = False

    def run(self, record: Callable[[], FrameworkRun | None], train: Callable[[], History]) -> History:
        """Return what `train` returns, or raise it with the signal that stopped the run; the record that this
        process has by then is closed. A signal to this process asks the run to stop meanwhile."""
        with ask_to_stop(self._request), _closing(record):
            history = train()
        if self._request.reason is not None:
            raise ending(self._request.reason, history)
        return history

    def asked(self) -> float:
        """Return 1.0 where this process was asked to stop: a number that the processes can add up."""
        return float(self._request.asked())

    def agree(self, asked: float) -> None:
        """Take the sum of all processes' `asked` after a step: where it is not 0, all of them end."""
        if asked:
            self.is_stopping = True
            self._request.ask(OTHER_RANK)

    def is_over(self, position: DataPosition) -> bool:
        return self.is_stopping or self._is_complete(position)

    def ends_after(self, step: int) -> bool:
        """Return whether no step follows this one, also inside of an epoch."""
        return self.is_stopping or self._has_all_steps(step)

    def leaves_epoch(self, position: DataPosition, batches: Iterator[Any]) -> bool:
        """Return whether the run ends inside of its epoch, which a resumed run then evaluates and ends.

        `batches` are those that are left of the epoch: whether there is one is only known by taking it where
        the data has no length. A process that is to stop has seconds, and leaves the evaluation out as well;
        but for that of the run's last step, after which no resumed run would make it.
        """
        if self._has_all_steps(position.step):
            return next(batches, None) is not None
        return self.is_stopping

    def reason(self, position: DataPosition) -> str | None:
        """Return why the run ends before its end; None: it has come to it."""
        return self._request.reason if self.is_stopping and not self._is_complete(position) else None

    # inside

    def _is_complete(self, position: DataPosition) -> bool:
        by_epochs = self._epochs is not None and position.epoch >= self._epochs
        return by_epochs or self._has_all_steps(position.step)

    def _has_all_steps(self, step: int) -> bool:
        return self._most is not None and step >= self._most


def ask_to_stop(request: StopRequest) -> AbstractContextManager[None]:
    """Have a signal to this process ask the run to stop, while the block lasts."""
    return listening(request.ask, ctrl_c=True, same_seconds=SAME_SIGNAL_SECONDS)


@contextmanager
def _closing(record: Callable[[], FrameworkRun | None]) -> Iterator[None]:
    """Close the record that the loop inside has at its end, with the error that ended the loop."""
    try:
        yield
    except BaseException as error:
        if (run := record()) is not None:
            run.close(error)
        raise
    if (run := record()) is not None:
        run.close()
