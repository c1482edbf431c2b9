"""What all ranks do together between two steps: duties in a fixed order, and how many of them are done.

Every rank derives the same agenda from what every rank knows, so a member that comes in the middle takes it
over from another and goes on after the last duty that was done. Must not know what a duty is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

Duty = list[Any]
"""A name, and numbers. Plain data: it travels to members that join."""


@final
class Agenda:
    """`concluding`: its end is the end of the run."""

    def __init__(self) -> None:
        self._duties: list[Duty] = []
        self.done = 0
        self.concluding = False

    @property
    def concluded(self) -> bool:
        return self.concluding and self.done >= len(self._duties)

    def clear(self) -> None:
        self._duties, self.done, self.concluding = [], 0, False

    def begin(self, duties: list[Duty]) -> None:
        """After a step: what was due before it is done."""
        self._duties, self.done = duties, 0

    def add(self, name: str) -> None:
        self._duties.append([name])

    def work_off(self, do: Callable[[str, list[int]], None]) -> None:
        """A duty that raises is not done: it comes again."""
        while self.done < len(self._duties):
            name, *numbers = self._duties[self.done]
            do(name, numbers)
            self.done += 1

    def state_dict(self) -> dict[str, Any]:
        return {"agenda": self._duties, "done": self.done, "concluding": self.concluding}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._duties, self.done = [list(duty) for duty in state["agenda"]], state["done"]
        self.concluding = state["concluding"]
