"""`paceline.MLflow`: parameters, metrics, figures and checkpoints of a run on an MLflow server, or in a
database or folder that MLflow writes itself."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any, Literal, final

from paceline.checkpoint.manifest import folder_name
from paceline.core.errors import UsageError
from paceline.core.wording import first_line
from paceline.monitor.trackers.measurements import TrackedRow, plain_name, summary
from paceline.monitor.trackers.run_settings import keep_identity, parameters, recall_identity
from paceline.monitor.trackers.tracker import OpenBackend, Tracker, check_installed
from paceline.train.callbacks import RunInfo, SavedCheckpoint
from paceline.train.history import History

_log = logging.getLogger(__name__)

_IDENTITY = "mlflow-run.json"
_DEFAULT_EXPERIMENT = "paceline"
# What a server takes in one request.
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100


@final
class MLflow(Tracker):
    """Writes to the run that is active where `fit` is called (`with mlflow.start_run(): ...`), else to a new
    run in `experiment` (default: "paceline"). A run that resumes continues its own.

    tracking_uri   default: what MLflow is set to, by mlflow.set_tracking_uri or MLFLOW_TRACKING_URI
    checkpoints    "all" as artifacts when they have become durable, the "last" one at the end, or "none";
                   those that are kept in a folder, not those at a URL far away, which are only named
    """

    def __init__(
        self,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        *,
        every: int | None = None,
        checkpoints: Literal["all", "last", "none"] = "all",
        flush_seconds: float = 30.0,
    ) -> None:
        super().__init__(every=every, flush_seconds=flush_seconds)
        check_installed("mlflow", "mlflow")
        if checkpoints not in ("all", "last", "none"):
            raise UsageError(f"checkpoints={checkpoints!r}", remedy='choose "all", "last" or "none"')
        self.experiment, self.tracking_uri, self.run_name = experiment, tracking_uri, run_name
        self.checkpoints = checkpoints
        self._active: str | None = None

    def _plan(self, run: RunInfo) -> OpenBackend:
        # Here, because MLflow's active run is one of the calling thread.
        active = _active_run() or self._active
        return lambda: _MlflowRun(self, run, active)

    def __getstate__(self) -> dict[str, Any]:
        """Take the active run along to the first rank's process, where no supervisor is used."""
        mlflow = sys.modules.get("mlflow")
        uri = self.tracking_uri or (None if mlflow is None else mlflow.get_tracking_uri())
        return {**super().__getstate__(), "_active": _active_run() or self._active, "tracking_uri": uri}


def _active_run() -> str | None:
    """Return the caller's active run; a program that has not imported MLflow has none."""
    mlflow = sys.modules.get("mlflow")
    active = None if mlflow is None else mlflow.active_run()
    return None if active is None else str(active.info.run_id)


@final
class _MlflowRun:
    """One run of MLflow. Metrics are collected and sent together, about once a second."""

    def __init__(self, tracker: MLflow, run: RunInfo, active: str | None) -> None:
        # The package is optional, and takes seconds to import.
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self._entities: Any = entities
        self._client: Any = MlflowClient(tracker.tracking_uri)
        self._checkpoints = tracker.checkpoints
        self._ours = active is None  # else the caller's block ends it
        self._metrics: list[Any] = []
        self._newest: SavedCheckpoint | None = None
        self._last_step = run.first_step
        known = recall_identity(run, _IDENTITY)
        if active is not None:
            self._id = active
        elif known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
        else:
            name = tracker.run_name or (None if run.run_dir is None else Path(run.run_dir).name)
            self._id = str(self._client.create_run(self._experiment(tracker), run_name=name).info.run_id)
            keep_identity(run, _IDENTITY, self._id)
        if known != self._id:
            self._send_parameters(parameters(run))

    def _experiment(self, tracker: MLflow) -> str:
        name = tracker.experiment or _DEFAULT_EXPERIMENT
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _send_parameters(self, values: dict[str, str]) -> None:
        given = [self._entities.Param(plain_name(name), value) for name, value in values.items()]
        for start in range(0, len(given), _MOST_PARAMETERS):
            try:
                self._client.log_batch(self._id, params=given[start : start + _MOST_PARAMETERS])
            except Exception as error:  # a second fit in one active run may have other settings
                _log.warning("MLflow keeps the parameters that its run has: %s", first_line(error))
                return

    def write(self, row: TrackedRow) -> None:
        self._last_step = max(self._last_step, row.step)
        moment = int(row.time * 1000)
        self._metrics += [
            self._entities.Metric(plain_name(name), value, moment, row.step)
            for name, value in row.values.items()
        ]
        if len(self._metrics) >= _MOST_METRICS:
            self.flush()

    def save(self, saved: SavedCheckpoint) -> None:
        self._newest = saved
        if self._checkpoints == "all":
            self._send_checkpoint(saved)

    def _send_checkpoint(self, saved: SavedCheckpoint) -> None:
        name = folder_name(saved.version)
        self._client.set_tag(self._id, "paceline.checkpoint", f"{saved.url}/{name}")
        folder = Path(saved.url) / name
        if "://" in saved.url:
            return
        # File by file: log_artifacts starts threads, which a process that ends would wait for.
        for file in sorted(folder.glob("*")):
            try:
                self._client.log_artifact(self._id, str(file), f"checkpoints/{name}")
            except FileNotFoundError:
                return  # deleted by the run's retention: newer ones follow

    def flush(self) -> None:
        while self._metrics:
            sent, self._metrics = self._metrics[:_MOST_METRICS], self._metrics[_MOST_METRICS:]
            self._client.log_batch(self._id, metrics=sent)

    def end(self, history: History | None) -> None:
        if history is not None:
            self.write(TrackedRow(self._last_step, time.time(), summary(history)))
        self.flush()
        if self._checkpoints == "last" and self._newest is not None:
            self._send_checkpoint(self._newest)
        if self._ours:
            status = "FAILED" if history is None else "FINISHED" if history.stopped is None else "KILLED"
            self._client.set_terminated(self._id, status)
