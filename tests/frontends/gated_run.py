"""The small run as a program that halts where a test wants it to: every rank waits in some steps for a file.

`python -m tests.frontends.gated_run FOLDER GATES PATIENCE STEP[,STEP...]`
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.train.small_run import fit, settings
from tests.waiting import wait_for

import paceline
from paceline.train.callbacks import Modifier


class Gates(Modifier):
    """In each of `steps`, a rank leaves a file `at-STEP-RANK` and waits until there is `open-STEP`."""

    def __init__(self, folder: Path, steps: list[int]) -> None:
        self._folder, self._steps, self._seen = folder, steps, 0

    def change_gradients(self, parameters: Any) -> None:
        self._seen += 1
        if self._seen in self._steps:
            (self._folder / f"at-{self._seen}-{os.environ['RANK']}").touch()
            wait_for((self._folder / f"open-{self._seen}").exists)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]


def main(folder: str, gates: str, patience: str, steps: str) -> None:
    care = paceline.FaultTolerance(patience=float(patience), max_worker_failures=0, max_preemptions=0)
    callbacks = [Gates(Path(gates), [int(step) for step in steps.split(",")])]
    print(fit(settings(Path(folder), 2, fault_tolerance=care), callbacks).state_hash)


if __name__ == "__main__":
    main(*sys.argv[1:])
