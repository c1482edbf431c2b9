"""Modifiers that communicate in a step whose group fails: what they did to themselves is undone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter

from paceline.comm.context import DistributedContext
from paceline.core.errors import GroupInterruptedError, UsageError
from paceline.testing.thread_transport import run_ranks
from paceline.train.callbacks import Callbacks, Modifier
from paceline.train.state.repeatable_changes import RepeatableChanges


class Counting(Modifier):
    """Communicates in the steps that are named; in the last one of these the group fails."""

    def __init__(self, context: DistributedContext, steps: tuple[int, ...]) -> None:
        self._context, self._steps, self.seen = context, steps, 0

    def change_gradients(self, parameters: Mapping[str, Parameter]) -> None:
        self.seen += 1
        if self.seen in self._steps:
            self._context.all_gather(self.seen)
        if self.seen == self._steps[-1]:
            raise GroupInterruptedError("cut off")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = state["seen"]


def after(context: DistributedContext, *steps: int) -> tuple[str, int]:
    """Return the error of the last step, and the steps that the modifier has seen then."""
    counting = Counting(context, steps)
    callbacks = Callbacks([counting])
    changes = RepeatableChanges(callbacks)
    try:
        for step in range(1, 10):
            with changes.undone_when_the_group_fails(context, step):
                callbacks.change_gradients({})
    except (GroupInterruptedError, UsageError) as error:
        return str(error), counting.seen
    raise AssertionError("nothing failed")


def test_the_step_that_failed_was_not_seen() -> None:
    for steps in ((1,), (1, 3), (1, 2, 3)):
        for error, seen in run_ranks(2, after, *steps):
            assert error.startswith("cut off")
            assert seen == steps[-1] - 1


def test_the_first_exchange_of_a_later_step_is_not_covered() -> None:
    for error, _ in run_ranks(2, after, 4):
        assert "change_gradients of step 4, for the first time" in error
