"""All-reduce algorithms, one file each, all of the same shape: `run(job)` and `cost(...)`.

The header of each file states the idea, what travels, what it costs and what it asks of the transport.
`hops` and `window` are the two ways for data to move that they share. Names map to modules here; a module is
imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol

from paceline.comm.algorithms.job import Job
from paceline.comm.cost import Choice, Links, Situation, decide
from paceline.core.errors import UsageError

MODULES = {
    "direct": "paceline.comm.algorithms.direct",
    "ring": "paceline.comm.algorithms.ring",
    "tree": "paceline.comm.algorithms.tree",
    "hierarchical": "paceline.comm.algorithms.hierarchical",
    "canonical": "paceline.comm.algorithms.canonical",
    "native": "paceline.comm.algorithms.native",
}
NAMES = tuple(MODULES)


class Algorithm(Protocol):
    """A module of this folder, seen as an object."""

    def run(self, job: Job) -> None: ...
    def cost(self, situation: Situation, links: Links) -> float:
        """Predicted seconds; infinity where the algorithm does not apply."""
        ...


@cache
def load(name: str) -> Algorithm:
    if name not in MODULES:
        allowed = ", ".join(("auto", *NAMES))
        raise UsageError(f"algorithm={name!r} is not known", remedy=f"use one of {allowed}")
    module: Algorithm = importlib.import_module(MODULES[name])
    return module


def choose(situation: Situation, links: Links) -> Choice:
    """What algorithm="auto" takes, and why."""
    return decide(situation, {name: load(name).cost(situation, links) for name in NAMES}, links)
