"""`paceline.WeightsAndBiases`: metrics and settings of a run in Weights & Biases, online or offline."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any, final

from paceline.monitor.trackers.measurements import TrackedRow, summary
from paceline.monitor.trackers.run_settings import keep_identity, parameters, recall_identity
from paceline.monitor.trackers.tracker import OpenBackend, Tracker, check_installed
from paceline.train.callbacks import RunInfo, SavedCheckpoint
from paceline.train.history import History

_log = logging.getLogger(__name__)

_IDENTITY = "wandb-run.json"
_STEP = "step"


@final
class WeightsAndBiases(Tracker):
    """Writes to the run that is active where `fit` is called (after wandb.init), else to a new one in
    `project`. A run that resumes continues its own.

    mode   "online", "offline" (below the run's folder, for `wandb sync`) or "disabled"; default: WANDB_MODE
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        mode: str | None = None,
        every: int | None = None,
        flush_seconds: float = 30.0,
    ) -> None:
        super().__init__(every=every, flush_seconds=flush_seconds)
        check_installed("wandb", "wandb")
        self.project, self.name, self.mode = project, name, mode

    def _plan(self, run: RunInfo) -> OpenBackend:
        wandb = sys.modules.get("wandb")
        active = None if wandb is None else wandb.run
        return lambda: _WandbRun(self, run, active)


@final
class _WandbRun:
    def __init__(self, tracker: WeightsAndBiases, run: RunInfo, active: Any) -> None:
        # The package is optional, and takes a second to import.
        import wandb

        self._ours = active is None
        self._last_step = run.first_step
        if active is None:
            known = recall_identity(run, _IDENTITY)
            folder = run.run_dir or "."
            active = wandb.init(
                project=tracker.project or "paceline",
                name=tracker.name or (None if run.run_dir is None else Path(run.run_dir).name),
                mode=tracker.mode,  # type: ignore[arg-type,unused-ignore]
                dir=folder,
                id=known,
                resume=None if known is None else "allow",
                settings=wandb.Settings(silent=True, console="off"),
            )
            keep_identity(run, _IDENTITY, str(active.id))
        self._run: Any = active
        self._run.config.update(parameters(run), allow_val_change=True)
        # Numbers of several ranks and of evaluations may come for a step that has passed already.
        self._run.define_metric("*", step_metric=_STEP)

    def write(self, row: TrackedRow) -> None:
        self._last_step = max(self._last_step, row.step)
        self._run.log({**row.values, _STEP: row.step})

    def save(self, saved: SavedCheckpoint) -> None:
        """Name the newest checkpoint in the run's summary; the files stay where they are."""
        self._run.summary["checkpoint"] = f"{saved.url} version {saved.version}"

    def flush(self) -> None:
        """Do nothing: the package's own process writes."""

    def end(self, history: History | None) -> None:
        if history is not None:
            figures = {f"run/{name}": value for name, value in summary(history).items()}
            self.write(TrackedRow(self._last_step, time.time(), figures))
        if self._ours:
            self._run.finish(exit_code=0 if history is not None else 1)
