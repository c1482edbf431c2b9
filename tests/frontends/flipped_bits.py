"""Models whose bits flip, and settings of runs that meet it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from tests.train.small_run import journal_of, settings
from torch import nn

import paceline
from paceline.train.callbacks import Modifier


def of(kind: type, folder: Path) -> list:
    return [event for event in journal_of(folder) if isinstance(event, kind)]


def supervised(folder: Path, workers: int, chaos: str | None = None, **changes):
    """Return the settings of a run under a supervisor, with faults to inject."""
    care = paceline.FaultTolerance(max_worker_failures=100, chaos=chaos)
    return settings(folder, workers, fault_tolerance=care, **changes)


class Flips(Modifier):
    """Once, in the worker of one rank: a bit of a parameter's memory, unnoticed by torch."""

    def __init__(self, mark: Path, step: int, rank: int, bit: int = 30) -> None:
        self.mark, self.step, self.rank, self.bit, self.seen = mark, step, rank, bit, 0

    def change_gradients(self, parameters):
        self.seen += 1
        if self.seen == self.step and os.environ.get("RANK") == str(self.rank) and not self.mark.exists():
            self.mark.touch()
            flip(next(iter(parameters.values())), self.bit)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Through /proc, as another process would."""
    word = ctypes.c_uint32.from_address(tensor.data_ptr())
    with open(f"/proc/{os.getpid()}/mem", "r+b", buffering=0) as memory:
        memory.seek(tensor.data_ptr())
        memory.write((word.value ^ (1 << bit)).to_bytes(4, "little"))


def build_large() -> nn.Module:
    """Looked at in three parts: a difference may be seen when wrong gradients are in the weights of all."""
    return nn.Sequential(nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 1100), nn.ReLU(), nn.Linear(1100, 3))
