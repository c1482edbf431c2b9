"""A run that other machines can join; a program for one host of a test:

    python -m tests.network.joined_run FOLDER OPEN_FILE [ballast=MB] [width=N] [key=value ...]

The other keys are those of FaultTolerance.

Two workers. Its steps are slow until OPEN_FILE is there, so that a test has a minute to do what it does.
Prints the final hash.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from pathlib import Path
from typing import Any

from tests.train import small_run
from tests.train.small_run import settings, trainer
from torch import nn

import paceline
from paceline.train.callbacks import Modifier
from paceline.train.settings.train_config import TrainConfig

EPOCHS = 40
STEPS = EPOCHS * small_run.STEPS_OF_EPOCH
_PAUSE_SECONDS = 0.4


class Unhurried(Modifier):
    """Every step takes a while until a file is there. `ballast` makes the job's payload larger."""

    def __init__(self, file: Path, ballast: bytes = b"") -> None:
        self._file = file
        self._open = False
        self._ballast = ballast

    def change_gradients(self, parameters: Any) -> None:
        limit = time.monotonic() + _PAUSE_SECONDS
        while not self._open and time.monotonic() < limit:
            self._open = self._file.exists()
            time.sleep(0.01)


def config_of(folder: Path, workers: int, care: paceline.FaultTolerance) -> TrainConfig:
    return settings(folder, workers, epochs=EPOCHS, audit_every=10, fault_tolerance=care)


def resuming(config: TrainConfig, version: int) -> TrainConfig:
    """The same run, from a version on."""
    return dataclasses.replace(config, resume=version)


def wide(width: int) -> nn.Module:
    """A model whose gradients need several packets."""
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 3))


def fit(config: TrainConfig, file: Path, ballast: bytes = b"", width: int = 0) -> str:
    model = functools.partial(wide, width) if width else small_run.build
    prepared = trainer(config, [Unhurried(file, ballast)], model=model)
    return str(prepared.fit(small_run.data()).state_hash)


def main(folder: str, file: str, *rest: str) -> None:
    options: dict[str, Any] = dict(item.split("=", 1) for item in rest)
    ballast, width = bytes(int(options.pop("ballast", 0)) << 20), int(options.pop("width", 0))
    for field in dataclasses.fields(paceline.FaultTolerance):
        if field.name in options and field.type in ("int", "float"):
            options[field.name] = {"int": int, "float": float}[field.type](options[field.name])
    care = paceline.FaultTolerance(**{"stragglers": "wait", **options})
    print(fit(config_of(Path(folder), 2, care), Path(file), ballast, width))


if __name__ == "__main__":
    main(*sys.argv[1:])
