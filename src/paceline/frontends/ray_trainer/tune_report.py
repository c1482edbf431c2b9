"""Reports of a run to the Ray Tune trial that it trains in.

Observers are called in the process that called `fit`, which is the trial's, and in the thread that called it:
there Tune ends a trial that its scheduler stops, with a SystemExit out of `ray.tune.report`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, final

from paceline.core.errors import UsageError
from paceline.train.callbacks import Observer, RunInfo
from paceline.train.history import EpochRecord, History, StepRecord


def current_trial() -> Path | None:
    """Return the folder of the Tune trial that this process is; None: it is none."""
    if "ray.tune" not in sys.modules:
        return None  # a trial's process has loaded it
    from ray import tune

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns outside of a trial
        folder = tune.get_context().get_trial_dir()
    return None if folder is None else Path(folder)


def metrics_of(record: EpochRecord) -> dict[str, Any]:
    """Return an epoch as Tune takes it: metrics of validation have the prefix val_."""
    return {
        "epoch": record.epoch,
        "samples": record.samples,
        **record.metrics,
        "loss": record.loss,
        **{f"val_{name}": value for name, value in record.validation.items()},
    }


@final
class TuneReport(Observer):
    """Reports every epoch to the Ray Tune trial that `fit` is called in: loss and metrics by their names,
    those of the validation data with the prefix val_. Outside of a trial it does nothing.

        def trial(config):
            trainer = paceline.Trainer(..., config=paceline.TrainConfig(engine=paceline.Ray(nodes=2), ...),
                                       callbacks=[paceline.TuneReport()])
            trainer.fit(data, validation)

    `holds_last`: every epoch waits for the step that follows it; the last one, which has none, for `finish`,
    which reports it with a checkpoint.
    """

    def __init__(self, *, holds_last: bool = False) -> None:
        self._holds_last = holds_last
        self._held: dict[str, Any] | None = None

    def on_start(self, run: RunInfo) -> None:
        self._held = None

    def on_step(self, record: StepRecord) -> None:
        self._report_held()

    def on_epoch(self, record: EpochRecord) -> None:
        if current_trial() is None:
            return
        self._report_held()
        self._held = metrics_of(record)
        if not self._holds_last:
            self._report_held()

    def on_end(self, history: History) -> None:
        # A trial that was lost after its last version trains no epoch when Tune starts it again.
        if self._holds_last and self._held is None and history.epochs:
            self._held = metrics_of(history.epochs[-1])

    def finish(self, checkpoint_folder: Path) -> None:
        """Report the end of training, with a folder that Tune keeps as the trial's checkpoint."""
        if current_trial() is None:
            return
        if self._held is None:
            raise UsageError("a trial that trained no whole epoch", remedy="train for one epoch or more")
        self._report_held(checkpoint_folder)

    def _report_held(self, checkpoint_folder: Path | None = None) -> None:
        held, self._held = self._held, None
        if held is not None:
            _report(held, checkpoint_folder)


def _report(metrics: dict[str, Any], checkpoint_folder: Path | None) -> None:
    from ray import tune

    if checkpoint_folder is None:
        tune.report(metrics)
    else:
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(str(checkpoint_folder)))
