"""The agenda between two steps: duties of all ranks in a fixed order, and how many of them are done.

Every rank derives the same agenda from what every rank knows, so a member that joins in the middle imports it
with the run's state and continues after the last duty that was done. What a duty does is in loop/duties.py.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final


@final
class Duty(enum.StrEnum):
    """The names travel to members that join, which run the same version of Paceline; no file holds them."""

    COMMIT_CHECKPOINT = (
        enum.auto()
    )  # with two numbers: the ranks that have written their part, that failed to
    EVALUATE = enum.auto()
    EVALUATE_AT_END = enum.auto()
    STOP = enum.auto()
    SAVE = enum.auto()
    SAVE_EPOCH = enum.auto()
    SAVE_LAST = enum.auto()
    DRAIN_CHECKPOINTS = enum.auto()
    CLOSE_EPOCH = enum.auto()
    CLOSE_LAST_EPOCH = enum.auto()
    COMPARE_MODIFIERS = enum.auto()
    COMPARE_WEIGHTS = enum.auto()


@final
class Agenda:
    """`concluding`: the run is over when these duties are done."""

    def __init__(self) -> None:
        self._duties: list[tuple[Duty, Sequence[int]]] = []
        self.done = 0
        self.concluding = False

    @property
    def concluded(self) -> bool:
        return self.concluding and self.done >= len(self._duties)

    def clear(self, *, concluding: bool = False) -> None:
        self._duties, self.done, self.concluding = [], 0, concluding

    def add(self, duty: Duty, *numbers: int) -> None:
        self._duties.append((duty, numbers))

    def work_off(self, do: Callable[[Duty, Sequence[int]], None]) -> None:
        """Do what is left. A duty that raises counts as not done and is repeated."""
        while self.done < len(self._duties):
            do(*self._duties[self.done])
            self.done += 1

    def state_dict(self) -> dict[str, Any]:
        duties = [[duty.value, *numbers] for duty, numbers in self._duties]
        return {"agenda": duties, "done": self.done, "concluding": self.concluding}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._duties = [(Duty(name), numbers) for name, *numbers in state["agenda"]]
        self.done, self.concluding = state["done"], state["concluding"]
