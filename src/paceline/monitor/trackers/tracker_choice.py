"""The trackers that settings ask for by a word (`tensorboard=True`, `mlflow_tracking=True`)."""

from __future__ import annotations

import os

from paceline.monitor.trackers.tracker import Tracker


def chosen_trackers(
    *,
    tensorboard: bool,
    tensorboard_dir: str | os.PathLike[str] | None,
    mlflow: bool,
    mlflow_experiment: str | None,
    every: int,
) -> list[Tracker]:
    """Return the trackers; a folder or an experiment asks for its tracker as well. `every`: steps between two
    records. Their modules are loaded where they are asked for."""
    made = list[Tracker]()
    if tensorboard or tensorboard_dir is not None:
        from paceline.monitor.trackers.tensorboard import TensorBoard

        made.append(TensorBoard(tensorboard_dir, every=every))
    if mlflow or mlflow_experiment is not None:
        from paceline.monitor.trackers.mlflow import MLflow

        made.append(MLflow(experiment=mlflow_experiment, every=every))
    return made
