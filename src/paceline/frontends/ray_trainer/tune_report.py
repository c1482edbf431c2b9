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
from paceline.train.history import EpochRecord


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

    `holds_last`: the last epoch waits for `finish`, which reports it with a checkpoint.
    """

    def __init__(self, *, holds_last: bool = False) -> None:
        self._holds_last = holds_last
        self._epochs: int | None = None
        self._held: dict[str, Any] | None = None
        self._newest: dict[str, Any] = {}

    def on_start(self, run: RunInfo) -> None:
        self._epochs, self._held = run.config.epochs, None

    def on_epoch(self, record: EpochRecord) -> None:
        if current_trial() is None:
            return
        self._newest = metrics_of(record)
        if self._holds_last and self._epochs is not None and record.epoch == self._epochs - 1:
            self._held = self._newest
        else:
            _report(self._newest)

    def finish(self, checkpoint_folder: Path) -> None:
        """Report the end of training, with a folder that Tune keeps as the trial's checkpoint."""
        if current_trial() is None:
            return
        from ray.tune import Checkpoint

        last, self._held = self._held or self._newest, None
        if not last:
            raise UsageError("a trial that trained no whole epoch", remedy="train for one epoch or more")
        _report(last, checkpoint=Checkpoint.from_directory(str(checkpoint_folder)))


def _report(metrics: dict[str, Any], **more: Any) -> None:
    from ray import tune

    tune.report(metrics, **more)
