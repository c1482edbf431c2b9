"""Drives the machine by hand: says what members would say, and checks the laws after each word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from paceline.core.control.messages import Progress
from paceline.elastic import machine
from paceline.elastic.model import (
    Action,
    Beaten,
    Began,
    Event,
    HasDialed,
    HasInstalled,
    Joined,
    Phase,
    Reported,
    Settings,
    Standing,
    StartWorker,
    TellDial,
    TellPrepare,
    TellView,
    Ticked,
    ViewPlan,
)
from paceline.elastic.state import State, in_view

A = TypeVar("A")


class Driven:
    """A job whose members do what they are told, when the test says so."""

    def __init__(self, workers: int = 4, shards: int = 8, began: Began | None = None, **settings: object):
        self.state: State = machine.initial(Settings(workers=workers, shards=shards, **settings))  # type: ignore[arg-type]
        self.now = 100.0
        self.actions: list[Action] = []
        self.reason = ""
        self.tell(began if began is not None else Began())

    def tell(self, event: Event, after: float = 0.0) -> list[Action]:
        """One event; the laws hold, the state that was given is as it was, and there is a reason."""
        self.now += after
        before = self.state
        kept = _snapshot(before)
        self.state, actions, self.reason = machine.step(before, event, self.now)
        self.actions = list(actions)
        assert _snapshot(before) == kept, f"step changed its argument on {event}"
        broken = machine.validate(self.state)
        broken += machine.validate_step(before, self.state, actions, self.reason)
        assert broken == [], f"{event}: {broken}"
        assert machine.allowed(before.phase, event, self.state.phase), (
            f"{before.phase} {event} {self.state.phase}"
        )
        return self.actions

    def wait(self, seconds: float, beating: bool = True) -> list[Action]:
        """Let time pass with a tick whenever one is due, while everybody beats or nobody does."""
        until = self.now + seconds
        told: list[Action] = []
        while self.now < until:
            due = machine.next_deadline(self.state)
            next_beat = self.now + self.state.settings.heartbeat
            self.now = min([until, next_beat] + ([max(due, self.now)] if due is not None else []))
            if beating and self.now == next_beat:
                for number in list(self.state.beats):
                    told += self.tell(self.state.beats[number])
            due = machine.next_deadline(self.state)
            if due is not None and self.now >= due:
                told += self.tell(Ticked())
            if due is None:
                break
        return told

    def running(self) -> Driven:
        """All came, and are in their first view."""
        self.join_all()
        self.install_all()
        assert self.state.phase is Phase.RUNNING
        return self

    def join_all(self, meet: bool = True) -> list[Action]:
        """All who were started come; `meet`: those of other places reach their peers, and are reached."""
        told: list[Action] = []
        for worker in list(self.state.workers.values()):
            if worker.standing is Standing.STARTING:
                told += self.tell(Joined(worker.number, worker.slot, worker.place))
        return told + self.meet_all(told) if meet else told

    def meet_all(self, told: Sequence[Action]) -> list[Action]:
        """Every probe that was asked for succeeds, in both directions."""
        more: list[Action] = []
        for action in some(told, TellDial):
            for peer in action.peers:
                more += self.tell(HasDialed(action.member, peer))
                more += self.tell(HasDialed(peer, action.member))
        return more

    def report_all(self, progress: Progress | None = (5, 0, 0), **held: tuple[int, ...]) -> list[Action]:
        """All who are asked report; joiners have nothing. `held` by "m3" for member 3."""
        told: list[Action] = []
        for number in sorted(self.state.waiting):
            new = self.state.workers[number].standing is Standing.READY
            have = None if new else progress
            told += self.tell(Reported(number, self.state.generation, have, held.get(f"m{number}", ())))
        return told

    def install_all(self) -> list[Action]:
        told: list[Action] = []
        for number in sorted(self.state.waiting):
            told += self.tell(HasInstalled(number, self.state.generation))
        return told

    def regroup(self, progress: Progress | None = (5, 0, 0), **held: tuple[int, ...]) -> ViewPlan:
        """All report and install what follows."""
        assert self.state.phase is Phase.PREPARING, self.state.phase
        told = self.report_all(progress, **held)
        plan = only(told, TellView).plan
        self.install_all()
        return plan

    def beat_all(self, steps: int = 5, phase: str = "forward", **of: Beaten) -> None:
        """A heartbeat of everybody in the view."""
        for worker in in_view(self.state):
            mine = of.get(f"m{worker.number}")
            self.tell(mine or Beaten(worker.number, phase, 0.01, (steps, 0, 0), (), 0.01, 0.02))

    @property
    def members(self) -> list[int]:
        return sorted(worker.number for worker in in_view(self.state))

    def of_slot(self, slot: int) -> int:
        number = self.state.slots[slot].worker
        assert number is not None
        return number


def _snapshot(state: State) -> dict[str, object]:
    """The fields, dictionaries copied: what is in them are frozen values."""
    fields = dict(state.__dict__)
    for name, value in fields.items():
        if isinstance(value, dict):
            fields[name] = dict(value)
    fields["votes"] = {step: dict(cast) for step, cast in state.votes.items()}
    return fields


def only(actions: Sequence[object], kind: type[A]) -> A:
    """The one action of this kind."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"{len(found)} of {kind.__name__} in {actions}"
    return found[0]


def some(actions: Sequence[object], kind: type[A]) -> list[A]:
    """All actions of this kind."""
    return [action for action in actions if isinstance(action, kind)]


def started(actions: Sequence[object]) -> list[int]:
    """The slots that workers were asked for."""
    return [action.slot for action in some(actions, StartWorker)]


def asked(actions: Sequence[object]) -> TellPrepare:
    return only(actions, TellPrepare)
