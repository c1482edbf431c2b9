"""All-reduce algorithms, one file each, all of one shape: `run(request)` and `cost(situation, links)`.

The header of each file states the idea, what travels, what it costs and what it asks of the transport. `shm/`
is what `direct` and `canonical` do in shared memory; the rounds of the others are in segment_moves.py. A
module is imported when its name is first asked for.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol

from paceline.comm.algorithms.reduce_request import ReduceRequest
from paceline.comm.cost import Choice, LinkCosts, Situation, decide
from paceline.core.errors import UsageError

NAMES = ("direct", "ring", "tree", "hierarchical", "canonical", "native")


class Algorithm(Protocol):
    """A module of this folder, seen as an object."""

    def run(self, request: ReduceRequest) -> None: ...
    def cost(self, situation: Situation, links: LinkCosts) -> float:
        """Predict the seconds of an all-reduce; infinity where the algorithm does not apply."""


@cache
def load(name: str) -> Algorithm:
    if name not in NAMES:
        allowed = ", ".join(("auto", *NAMES))
        raise UsageError(f"algorithm={name!r} is not known", remedy=f"use one of {allowed}")
    module: Algorithm = importlib.import_module(f"paceline.comm.algorithms.{name}")
    return module


def choose(situation: Situation, links: LinkCosts) -> Choice:
    """Return what algorithm="auto" takes, and why."""
    return decide(situation, {name: load(name).cost(situation, links) for name in NAMES}, links)
