"""The supervisor's machine and the members' machines together, without a process: each message of one goes to
the other, and a member is killed at a moment of its way into a view."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
from tests.elastic.machine.machine_driver import Driven, hello_of, report_of

from paceline.control import member_machine
from paceline.control.member_invariants import violations
from paceline.control.member_shell_rules import queue_up
from paceline.control.member_state import (
    GroupLeft,
    MemberEvent,
    MemberPhase,
    MemberState,
    OpenView,
    SendMessage,
    SendReport,
    StateReady,
    TrainingAction,
    ViewOpened,
)
from paceline.control.messages import MemberAccepted
from paceline.elastic.machine.actions import Action, InstallView, Send, StartWorker
from paceline.elastic.machine.machine_events import FromMember, WorkerLost
from paceline.elastic.machine.state import JobPhase

P = MemberPhase
PROGRESS = (5, 0, 0)


class Cluster:
    """A job of three workers. Messages arrive in the order in which they were sent; members take steps,
    report, open views and take states at once. A member that is `held` in a phase goes no further, as one
    whose process is slow, until it is killed."""

    def __init__(self) -> None:
        self.job = Driven(workers=3, shards=6)
        self.members: dict[int, MemberState] = {}
        self.slots: dict[int, int] = {}
        self.held: dict[int, MemberPhase] = {}
        self._actions: dict[int, deque[TrainingAction]] = {}
        self._sent: deque[tuple[int | None, Any]] = deque()  # to a member; None: to the supervisor
        self._carry_out(self.job.actions)
        self._deliver()

    @property
    def in_view(self) -> list[int]:
        return sorted(number for number, state in self.members.items() if state.phase is P.IN_VIEW)

    def kill(self, number: int) -> None:
        del self.members[number]
        self._sent.append((None, WorkerLost(number, "crash", "killed")))
        self._deliver()

    def replace_one(self, hold: MemberPhase) -> int:
        """Kill a member; return its replacement, which stays in this phase."""
        number = self.job.state.next_member
        self.held[number] = hold
        self.kill(max(self.in_view))
        return number

    def wait(self, seconds: float) -> None:
        self.job.beat_all()
        self._carry_out(self.job.wait(seconds))
        self._deliver()

    def _deliver(self) -> None:
        while self._sent:
            number, event = self._sent.popleft()
            if number is None:
                self._carry_out(self.job.tell(event))
            elif number in self.members and self.members[number].phase is not self.held.get(number):
                self._feed(number, event)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case StartWorker(number, slot):
                    self.members[number], self.slots[number] = MemberState(number, 30.0), slot
                    self._actions[number] = deque()
                    self._sent.append((number, MemberAccepted(heartbeat=0.25, patience=30.0)))
                    if self.held.get(number) is not P.JOINING:
                        self._sent.append((None, hello_of(number, slot)))
                case Send(numbers, message):
                    self._sent += [(number, message) for number in numbers]
                case InstallView(plan, _):
                    size = len(plan.members)
                    where = {"hosts": ("",) * size, "hostnames": ("",) * size, "endpoints": (("", 0),) * size}
                    view = plan.to_view(pids=plan.members, **where)
                    self._sent += [(number, view) for number in plan.members]

    def _feed(self, number: int, event: MemberEvent) -> None:
        before = self.members[number]
        state, actions = member_machine.step(before, event, self.job.now)
        assert violations(before, state, actions) == []
        self.members[number] = state
        for action in queue_up(event, actions, self._actions[number]):
            if isinstance(action, SendMessage):
                self._sent.append((None, FromMember(number, action.message)))
        if state.phase is P.IN_VIEW and state.prepare is not None:
            self._feed(number, GroupLeft())  # interrupted, or after the next common step
        elif state.phase is not self.held.get(number):
            self._train(number)

    def _train(self, number: int) -> None:
        """Let the training thread do what waits for it."""
        while self._actions[number]:
            match self._actions[number].popleft():
                case SendReport(generation):
                    progress = PROGRESS if self.members[number].has_state else None
                    self._sent.append((None, report_of(number, generation, progress)))
                case OpenView():
                    self._feed(number, ViewOpened())
                    self._feed(number, StateReady(PROGRESS))


def test_all_workers_of_a_new_job_come_into_its_first_view():
    cluster = Cluster()
    assert cluster.in_view == [1, 2, 3]
    assert cluster.job.state.phase is JobPhase.RUNNING


@pytest.mark.parametrize("hold", [P.JOINING, P.WAITING, P.OPENING])
def test_killed_while_joining_the_next_worker_of_the_slot_takes_its_place(hold):
    cluster = Cluster()
    killed = cluster.replace_one(hold)
    assert cluster.members[killed].phase is hold
    cluster.kill(killed)
    cluster.wait(2.0)
    (following,) = set(cluster.members) - {1, 2}
    assert following > killed
    assert cluster.slots[following] == cluster.slots[killed] == 2
    assert cluster.in_view == [1, 2, following]
    assert cluster.job.state.phase is JobPhase.RUNNING
    for state in cluster.members.values():
        assert state.generation == cluster.job.state.generation
        assert state.view is not None
        assert state.view.members == (1, 2, following)


def test_killed_before_it_is_accepted_the_others_are_not_disturbed():
    cluster = Cluster()
    killed = cluster.replace_one(P.JOINING)
    assert cluster.in_view == [1, 2]
    generation = cluster.job.state.generation
    cluster.kill(killed)
    assert cluster.in_view == [1, 2]
    assert cluster.job.state.generation == generation
