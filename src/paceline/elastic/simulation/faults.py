"""What befalls a run: drawn from the seed, told by name, done to the world at its time.

A fault is plain data, so a schedule can be printed, counted and repeated. Must not know the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import final

KINDS: dict[str, int] = {
    "crash": 10,
    "crash in phase": 14,
    "crash of many": 4,
    "crash of all": 1,
    "memory": 2,
    "hang": 4,
    "hang in phase": 5,
    "stop": 4,
    "stop all": 2,
    "grip": 4,
    "slow": 4,
    "cut line": 5,
    "partition": 4,
    "one way up": 3,
    "one way down": 3,
    "cut link": 4,
    "one way link": 3,
    "isolate": 2,
    "packet loss": 3,
    "coordinator crash": 6,
    "coordinator stall": 2,
    "suspend": 2,
    "agent comes": 4,
    "walled agent comes": 3,
    "agent goes": 3,
    "scale": 5,
    "leave": 5,
    "leave all": 1,
    "raise once": 3,
    "raise always": 1,
    "raise user": 1,
    "dissent": 2,
    "damaged data": 2,
    "bad start": 3,
    "stop job": 1,
}
"""Kinds and how likely they are. A way up is from a member to the supervisor; a link is between members;
a grip is a call that holds the interpreter's lock."""

LASTING = frozenset(
    {
        "hang",
        "hang in phase",
        "stop",
        "stop all",
        "grip",
        "slow",
        "cut line",
        "partition",
        "one way up",
        "one way down",
        "cut link",
        "one way link",
        "isolate",
        "packet loss",
        "coordinator stall",
        "walled agent comes",
    }
)
"""Kinds that are over after a while, most of the time."""

PHASES = ("forward", "collective", "optimizer", "checkpoint", "evaluation", "wait", "committed")


@final
@dataclass(frozen=True)
class Fault:
    """`who` picks a worker (or several) of those that live then; `lasts` is how long; 0: for good."""

    at: float
    kind: str
    who: int
    lasts: float = 0.0
    phase: str = ""
    amount: int = 0

    def __str__(self) -> str:
        phase = f" in {self.phase}" if self.phase else ""
        lasts = f" for {self.lasts:.2f} s" if self.lasts else ""
        return f"{self.at:.3f} {self.kind}{phase}{lasts} (who {self.who}, amount {self.amount})"


def drawn(rng: Random, workers: int) -> tuple[Fault, ...]:
    """A schedule: none, one, or several faults, sometimes at the same moment."""
    count = rng.choice((0, 1, 1, 2, 3, 4, 5, 6, 8, 12))
    if workers > 64:
        count += rng.randrange(8)
    kinds = list(KINDS)
    weights = list(KINDS.values())
    at = 0.0
    faults: list[Fault] = []
    for _ in range(count):
        # One in four comes while the last one is being repaired.
        at = at + rng.random() * 0.05 if faults and rng.random() < 0.25 else rng.random() * 6.0
        kind = rng.choices(kinds, weights)[0]
        lasting = kind in LASTING
        faults.append(
            Fault(
                at,
                kind,
                rng.randrange(1 << 20),
                lasts=rng.choice((0.1, 0.5, 1.2, 3.0, 8.0)) if lasting and rng.random() < 0.8 else 0.0,
                phase=rng.choice(PHASES) if kind.endswith("in phase") else "",
                amount=rng.randrange(1 << 20),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at))
