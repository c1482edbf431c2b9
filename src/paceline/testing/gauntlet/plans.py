"""Draw failures from a seed: pure, so that a seed is enough to run a plan again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal, final

from paceline.core.faults import STEP_PHASES, Fault
from paceline.core.wording import counted

DisturbanceKind = Literal["kill", "stop", "terminate", "kill supervisor", "kill all", "scale", "end"]

_PHASES: Final = (*STEP_PHASES, "collective", "collective", "checkpoint", "evaluation")
_MOST_FAILURES: Final = 3
_DELAY: Final = 0.008  # of a signal within a phase: about a step
_APART: Final = 0.05  # between the two of a double kill
_WINDOW: Final = 1.2  # seconds from the first view in which failures come from outside
_OUTSIDE: Final = ("kill", "kill", "double", "stop", "terminate", "supervisor", "scale", "scale", "all")
_WITHOUT_SUPERVISOR: Final = ("kill", "kill", "double", "stop", "terminate", "all")


@final
@dataclass(frozen=True)
class OutsideAction:
    """One failure from outside, `at` seconds after the run's first view. `number` chooses the worker, or is
    how many workers are wanted; `seconds` is how long a stop lasts."""

    at: float
    kind: DisturbanceKind
    number: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        more = {"scale": f" to {self.number}", "stop": f" of {self.seconds * 1e3:.0f} ms"}.get(self.kind, "")
        return f"{self.kind}{more} at {self.at:.3f} s"


@final
@dataclass(frozen=True)
class FaultPlan:
    """Plan of one run. `resumed_on`: the numbers of workers of later starts, after it was ended."""

    workers: int
    chaos: tuple[Fault, ...]
    outside: tuple[OutsideAction, ...]
    resumed_on: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [counted(self.workers, "worker"), *map(str, self.chaos), *map(str, self.outside)]
        return "; ".join([*parts, *(f"resumed on {workers}" for workers in self.resumed_on)])


def draw(
    feature: str, seed: int, *, steps: int, shards: int, inside: bool = True, supervised: bool = True
) -> FaultPlan:
    """Draw the plan of a feature and seed. `inside`: workers can inject failures into themselves.
    `supervised`: there is a supervisor to kill, and to ask for another size or an end."""
    dice = random.Random(f"{feature}/{seed}")
    workers = dice.randint(2, shards)
    chaos: list[Fault] = []
    outside: list[OutsideAction] = []
    resumed: tuple[int, ...] = ()
    for _ in range(dice.randint(1, _MOST_FAILURES)):
        chance = dice.random() if inside else 0.6 + 0.4 * dice.random()
        if chance < 0.6:
            chaos += _from_inside(dice, workers, steps)
        elif chance < 0.95:
            outside += _from_outside(dice, shards, _OUTSIDE if supervised else _WITHOUT_SUPERVISOR)
        elif not supervised:
            outside.append(OutsideAction(dice.uniform(0.0, _WINDOW), "kill all"))
        elif not resumed:
            resumed = (dice.randint(1, shards),)
            outside.append(OutsideAction(dice.uniform(0.0, _WINDOW), "end"))
    return FaultPlan(workers, tuple(chaos), tuple(sorted(outside, key=lambda act: act.at)), resumed)


def _from_inside(dice: random.Random, workers: int, steps: int) -> list[Fault]:
    rank, step = dice.randrange(workers), dice.randint(1, steps)
    other = (rank + dice.randint(1, workers - 1)) % workers
    phase, delay = dice.choice(_PHASES), dice.choice((None, round(dice.uniform(0.0, _DELAY), 6)))
    first = Fault(kind="kill", rank=rank, step=step, phase=phase, after=delay)
    match dice.choice(("kill", "kill", "double", "joiner", "survivor", "stop", "leave")):
        case "double":
            later = round((delay or 0.0) + dice.uniform(0.0, _APART), 6)
            return [first, Fault(kind="kill", rank=other, step=step, phase=phase, after=later)]
        case "joiner":
            # The replacement, while it waits for its view or receives the state.
            wait = round(dice.uniform(0.0, 0.15), 6)
            return [first, Fault(kind="kill", rank=rank, phase="wait", attempt=2, after=wait)]
        case "survivor":
            # A member that is left, while it regroups or hands its state over.
            wait = round(dice.uniform(0.0, 0.03), 6)
            return [first, Fault(kind="kill", rank=other, step=step, phase="wait", after=wait)]
        case "stop":
            length = round(dice.uniform(0.001, 0.3), 6)
            return [Fault(kind="stop", rank=rank, step=step, phase=phase, seconds=length, after=delay)]
        case "leave":
            return [Fault(kind="leave", rank=rank, step=step, phase=phase, after=delay)]
    return [first]


def _from_outside(dice: random.Random, shards: int, kinds: tuple[str, ...]) -> list[OutsideAction]:
    at, number = dice.uniform(0.0, _WINDOW), dice.randrange(shards)
    match dice.choice(kinds):
        case "double":
            return [
                OutsideAction(at, "kill", number),
                OutsideAction(at + dice.uniform(0.0, _APART), "kill", number + 1),
            ]
        case "stop":
            return [OutsideAction(at, "stop", number, dice.uniform(0.001, 0.3))]
        case "terminate":
            return [OutsideAction(at, "terminate", number)]
        case "supervisor":
            return [OutsideAction(at, "kill supervisor")]
        case "scale":
            return [
                OutsideAction(at, "scale", dice.randint(1, shards)),
                OutsideAction(at + 0.4, "scale", dice.randint(1, shards)),
            ]
        case "all":
            return [OutsideAction(at, "kill all")]
    return [OutsideAction(at, "kill", number)]
