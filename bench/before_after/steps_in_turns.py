"""Step times of two checkouts whose runs are started together and take turns.

From one start to the next, a step's time changes by ten per cent and more: where the memory of a process
lies stays as it is for as long as the process lives, and the machine drifts. Runs of both checkouts that are
alive at once, one of them suspended, share the drift; starting them anew in every round averages the rest.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

from bench.recovery.steady_state import ENDLESS, Contestant, in_turns
from bench.recovery.supervised_run import RunSettings

TURNS = 6
STEPS = 30
KINDS = {"step, supervised": True, "step, not supervised": False}


def steady_state(before: Path, after: Path, turn: int) -> dict[str, tuple[float, float]]:
    """Return seconds of a step of 4 workers before and after, with and without a supervisor."""
    return {
        name: _pair(before, after, supervised=supervised, reverse=turn % 2 == 1)
        for name, supervised in KINDS.items()
    }


def _pair(before: Path, after: Path, *, supervised: bool, reverse: bool) -> tuple[float, float]:
    checkouts = {"before": before, "after": after}
    order = list(reversed(checkouts)) if reverse else list(checkouts)
    with tempfile.TemporaryDirectory(prefix="paceline-before-") as folder, ExitStack() as stack:
        running = {
            name: Contestant(
                RunSettings(str(Path(folder, name)), ENDLESS, supervised=supervised),
                stack,
                environment_of(checkouts[name]),
            )
            for name in order
        }
        found = in_turns(running, TURNS, STEPS)
    return found["before"], found["after"]


def environment_of(checkout: Path) -> dict[str, str]:
    """Return the variables with which a process imports a checkout's own `paceline` and `bench`."""
    path = os.pathsep.join([str(checkout / "src"), str(checkout)])
    # Without it, `python -m` looks into the current folder first.
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
