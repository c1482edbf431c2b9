"""Steps that are handed out to workers: in order, and with an end where none is left to make them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import PeerLostError
from paceline.frontends.framework_trainers.handed_out_steps import HandedOutSteps


class Value:
    """What a worker will have, when it has come."""

    def __init__(self, number: int) -> None:
        self.number, self.has_come = number, threading.Event()

    def fetch(self) -> int:
        self.has_come.wait()
        if self.number < 0:
            raise ValueError("the step failed")
        return self.number


COORDINATOR = SimpleNamespace(schedule=lambda step, args: step(*args))


def test_figures_come_in_the_order_of_the_steps() -> None:
    first, second = Value(1), Value(2)
    with HandedOutSteps(COORDINATOR, None) as steps:
        for value in (first, second):
            steps.hand_out(lambda value: value, value)
        second.has_come.set()
        first.has_come.set()
        assert [len(steps), steps.take(), len(steps), steps.take(), len(steps)] == [2, 1, 1, 2, 0]


def test_the_error_of_a_step_is_raised_where_its_figures_are_taken() -> None:
    failed = Value(-1)
    failed.has_come.set()
    with HandedOutSteps(COORDINATOR, None) as steps:
        steps.hand_out(lambda value: value, failed)
        with pytest.raises(ValueError, match="the step failed"):
            steps.take()


def test_a_loss_ends_the_wait_for_a_step_that_no_worker_makes() -> None:
    told: list[Callable[[PeerLostError], None]] = []
    served: Any = SimpleNamespace(tell_when_over=told.append)
    never = Value(1)

    def train() -> None:
        with HandedOutSteps(COORDINATOR, served) as steps:
            steps.hand_out(lambda value: value, never)
            watcher = threading.Thread(target=told[0], args=(PeerLostError("the last worker", rank=2),))
            watcher.start()
            steps.take()

    with pytest.raises(PeerLostError, match="the last worker"):
        train()
    never.has_come.set()  # the thread that waits for it ends
