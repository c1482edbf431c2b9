"""Loops of a user's own as ways to train, with the step-by-step manager or in a session: processes that
nothing replaces, and a program that is started again, on another number of them, when all are gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from paceline.core.errors import InternalError, PeerLostError
from paceline.frontends.launcher.master_port import free_port
from paceline.testing.gauntlet import stepwise_ranks
from paceline.testing.gauntlet.stepwise_ranks import LoopKind, StepwiseStart
from paceline.train.settings.train_config import TrainConfig

_MOST_STARTS: Final = 4
_WORKER = ("-m", stepwise_ranks.__name__)


def train_by_steps(config: TrainConfig, steps: int, loop: LoopKind) -> tuple[str, tuple[float, ...]]:
    """Train to the end with the faults of `config`; return the hash of the weights, and the losses. Processes
    that disagree are an error."""
    folder, shards = str(config.run_dir), config.shards or 1
    with subprocess.Popen(
        [sys.executable, *_WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        workers, chaos = config.workers, config.fault_tolerance.chaos or ""
        for number in range(_MOST_STARTS):
            start = StepwiseStart(
                folder, number, workers, free_port(), steps, shards, config.seed, str(chaos), number > 0, loop
            )
            server.stdin.write(stepwise_ranks.encoded(start))
            server.stdin.flush()
            ends = json.loads(server.stdout.readline())
            if any(ends):
                return _agreed(ends), _losses(Path(folder))
            workers, chaos = workers % shards + 1, ""
    raise PeerLostError(f"all processes were lost in each of {_MOST_STARTS} starts")


def _agreed(ends: list[str]) -> str:
    found = {one for one in ends if one}
    if len(found) > 1:
        raise InternalError(f"the processes ended with {' and '.join(sorted(found))}")
    return found.pop()


def _losses(folder: Path) -> tuple[float, ...]:
    """Return the losses that the processes of all starts have seen; a step has one."""
    seen: dict[int, float] = {}
    for file in sorted(folder.glob("losses-*")):
        for line in file.read_text().splitlines():
            step, loss = line.split()
            known = seen.setdefault(int(step), float.fromhex(loss))
            if known != float.fromhex(loss):
                raise InternalError(f"step {step} has the losses {known} and {float.fromhex(loss)}")
    return tuple(loss for _, loss in sorted(seen.items()))
