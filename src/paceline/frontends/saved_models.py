"""Weights of a run's checkpoint in a module: `paceline.load_model` for inference, `Trainer.load` for the
trainer's own model.

Reads only: neither a folder nor a worker is made. Importing this module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, final

from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import UsageError
from paceline.frontends.run_preparation import check_model
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.run_folder import RunFolder, find_latest

if TYPE_CHECKING:
    from torch import nn

_ANOTHER_MODEL = "build the model as it was when the run was trained, or load another run or version"


@final
@dataclass(frozen=True)
class SavedRun:
    """The place of a run's checkpoints, and what "best" means there."""

    store: CheckpointStore
    metric: str = "loss"
    mode: Literal["min", "max"] = "min"

    @staticmethod
    def of_folder(path: Path, config: TrainConfig | None = None) -> SavedRun:
        """Return the run in a folder, with its recorded settings of checkpoints, else those of `config`."""
        folder = RunFolder(path)
        if config is not None:
            own = config.checkpoint
            return SavedRun(CheckpointStore(folder.checkpoint_url(config)), own.metric, own.mode)
        recorded: Mapping[str, Any] = folder.recorded().get("checkpoint", {})
        url = recorded.get("url") or folder.checkpoints
        mode: Literal["min", "max"] = "max" if recorded.get("mode") == "max" else "min"
        return SavedRun(CheckpointStore(url), str(recorded.get("metric", "loss")), mode)

    @staticmethod
    def named(config: TrainConfig) -> SavedRun:
        """Return the run that `config` names: its `run_dir`, else the newest run called `name`."""
        if config.run_dir is False:
            raise UsageError(
                "run_dir=False: the run kept no checkpoint to load",
                remedy="give the run a folder: TrainConfig(run_dir=...), or leave run_dir out",
            )
        if config.run_dir is not None:
            folder: RunFolder | None = RunFolder(Path(config.run_dir).absolute())
        else:
            folder = find_latest(config.name)
        if folder is None or not folder.holds_run():
            place = f"at {folder.path}" if folder is not None else f"called {config.name!r} below runs/"
            raise UsageError(
                f"there is no run {place} to load from",
                remedy="call fit first, or give the folder of a run: TrainConfig(run_dir=...)",
            )
        return SavedRun.of_folder(folder.path, config)

    def load_into(
        self,
        module: nn.Module,
        version: int | str,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
    ) -> int:
        """Copy parameters and buffers of a version into the module, all or none; return its number."""
        from paceline.train.state import model_state

        found = self.store.open(
            "latest" if version == "last" else version,
            metric=metric or self.metric,
            mode=mode or self.mode,
        )
        tensors = model_state.from_pairs(found.tensors(), found.state.get("pairs", ()))
        model_state.load_model(module, tensors, _ANOTHER_MODEL)
        return found.version


def load_model(
    run: str | os.PathLike[str],
    model: nn.Module | Callable[[], nn.Module],
    version: int | str = "best",
    *,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
) -> nn.Module:
    """Return the model with the weights of a run's checkpoint, in eval mode.

        model = paceline.load_model("runs/digits", build_model)

    run       the folder of a run, or a folder or URL that holds checkpoints
    model     a module, which is filled in place, or a function that builds one
    version   "best" by the metric that the run kept its best by (or by `metric` and `mode`), "last", the
              number of a version, or a tag

    A model with other parameters or buffers, or with other shapes, is refused with their names.
    """
    from paceline.frontends.fit_drivers import built

    check_model(model)
    path = Path(run).absolute()
    if RunFolder(path).holds_run():
        saved = SavedRun.of_folder(path)
    elif path.is_dir() or "://" in str(run):
        saved = SavedRun(CheckpointStore(run))
    else:
        raise UsageError(
            f"there is no run at {path}", remedy="give the folder that TrainConfig(run_dir=...) made"
        )
    module = built(model, seed=0)
    saved.load_into(module, version, metric, mode)
    return module.eval()
