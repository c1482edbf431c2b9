"""Supervised runs of the small model: their settings, their journal, and what must hold of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tests.train.small_run import fit, journal_of, settings
from tests.waiting import wait_for
from typer.testing import CliRunner

import paceline
from paceline.cli.main import app
from paceline.train.callbacks import Modifier


def of(kind: type, folder: Path) -> list:
    return [event for event in journal_of(folder) if isinstance(event, kind)]


def supervised(folder: Path, workers: int = 3, chaos: str | None = None, **changes):
    """Return the settings of a run under a supervisor, with faults to inject."""
    care = changes.pop("care", {})
    care = paceline.FaultTolerance(**{"max_worker_failures": 100, "chaos": chaos, **care})
    return settings(folder, workers, fault_tolerance=care, **changes)


def check_exactly_once(folder: Path) -> None:
    """`paceline audit` finds every step and sample once."""
    done = CliRunner().invoke(app, ["audit", str(folder)])
    assert done.exit_code == 0, done.output


class Gate(Modifier):
    """Every rank waits after a step until a file is there: a test does something meanwhile."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step, self._seen = folder, step, 0

    def change_gradients(self, parameters):
        self._seen += 1
        if self._seen == self._step:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"at-{os.getpid()}").touch()
            wait_for(lambda: (self._folder / "open").exists())

    def state_dict(self):
        return {"seen": self._seen}

    def load_state_dict(self, state):
        self._seen = state["seen"]


def behind_gate(config, gate_folder: Path, act) -> paceline.History:
    """Trains; `act` is called while the first worker waits at the gate, which then opens."""

    def watch() -> None:
        wait_for(lambda: gate_folder.exists() and any(gate_folder.glob("at-*")))
        try:
            act()
        finally:
            (gate_folder / "open").touch()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return fit(config, [Gate(gate_folder, 8)])
    finally:
        thread.join()
