"""Optimizers that take turns, as the two of a GAN do: which one steps is a function of the step's number, so
that every rank, a repaired run and one that resumes agree on it without a word.

In a turn the parameters of the other optimizers rest: the gradients that the loss gives them are dropped
before anything is summed, so no norm, no scale, no modifier and no optimizer ever sees them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.core.errors import ConfigError
from paceline.core.wording import counted


@final
class OptimizerTurns:
    """The optimizers of a run; `turns` are the steps in a row of each, None where all step together."""

    def __init__(self, optimizers: Sequence[Optimizer], turns: Sequence[int] | None) -> None:
        if turns is not None and len(turns) != len(optimizers):
            raise ConfigError(
                f"optimizer_turns={tuple(turns)} has {counted(len(turns), 'turn')}, and the run has "
                f"{counted(len(optimizers), 'optimizer')}",
                remedy="give one number for each optimizer of the list, in its order; all of them step in "
                "every step where optimizer_turns is left out",
                key="optimizer_turns",
            )
        self._optimizers = list(optimizers)
        self._order = [number for number, steps in enumerate(turns or ()) for _ in range(steps)]
        self._held = [
            [parameter for group in one.param_groups for parameter in group["params"]] for one in optimizers
        ]

    def at(self, step: int) -> int | None:
        """Return the number of the optimizer whose turn step `step`, counted from 0, is."""
        return self._order[step % len(self._order)] if self._order else None

    def first_of_turn(self, step: int) -> bool:
        """Return whether this is the first step of the run that its optimizer takes."""
        return step == (self._order.index(self._order[step]) if step < len(self._order) else 0)

    def resting(self, turn: int | None) -> list[Parameter]:
        """Return the parameters whose gradients are dropped in this turn."""
        if turn is None:
            return []
        return [one for number, held in enumerate(self._held) if number != turn for one in held]

    def active(self, turn: int | None) -> Sequence[Optimizer]:
        return self._optimizers if turn is None else [self._optimizers[turn]]

    def taking_part(self, turn: int | None, trained: Mapping[str, Parameter]) -> list[str]:
        """Return the names of the parameters that can get a gradient in this turn."""
        resting = set(map(id, self.resting(turn)))
        return [name for name, parameter in trained.items() if id(parameter) not in resting]

    def kind(self, turn: int) -> str:
        return type(self._optimizers[turn]).__name__
