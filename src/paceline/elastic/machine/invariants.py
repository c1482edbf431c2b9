"""Check the invariants of machine.py on a state, or on a step from one state to the next.

For tests and for the simulation, which check after every event. Must not be needed for a decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import compress
from math import inf
from operator import is_not
from typing import TypeVar

from paceline.control.messages import ViewPlan
from paceline.elastic.machine.actions import (
    Action,
    EndJob,
    InstallView,
    ProbeWorkers,
    RequestDial,
    Send,
    StartWorker,
)
from paceline.elastic.machine.admission import have_met
from paceline.elastic.machine.state import IN_VIEW, JobPhase, JobState, WorkerStatus, in_view

T = TypeVar("T")

_WHOLE = (JobPhase.INSTALLING, JobPhase.RUNNING, JobPhase.STOPPING)


def validate(state: JobState) -> list[str]:
    """Return the broken invariants, each as a sentence; empty: none is."""
    wrong: list[str] = []
    _check_view(state, wrong)
    if state.view is not None:
        wrong += wrong_plan(state.view, state.settings.shards)
    _check_workers(state, state.workers, wrong)
    _check_slots(state, state.slots, wrong)
    _check_waiting(state, wrong)
    _check_end(state, wrong)
    _check_back(state, state.workers, wrong)
    return wrong


def validate_change(before: JobState, after: JobState) -> list[str]:
    """Return the same as `validate(after)`, where `before` was valid: only what the change could have broken
    is checked, so that a heartbeat among a thousand workers costs little."""
    if (
        before.phase is not after.phase
        or before.generation != after.generation
        or before.stop_reason != after.stop_reason
    ):
        return validate(after)
    wrong: list[str] = []
    workers = _changed(before.workers, after.workers)
    slots = _changed(before.slots, after.slots)
    switched = workers and any(_is_in_view(before, n) != _is_in_view(after, n) for n in workers)
    if before.view is not after.view or switched:
        _check_view(after, wrong)
    if before.view is not after.view and after.view is not None:
        wrong += wrong_plan(after.view, after.settings.shards)
    if workers or len(after.last_message_at) < len(before.last_message_at):
        dropped = before.last_message_at.keys() - after.last_message_at.keys()
        _check_workers(after, {*workers, *dropped}, wrong)
    if workers or slots:
        left = {before.workers[number].slot for number in workers if number in before.workers}
        _check_slots(after, {*slots, *left}, wrong)
    if workers or before.pending is not after.pending or before.reports != after.reports:
        _check_waiting(after, wrong)
    if workers or slots or before.next_tick_at != after.next_tick_at or before.ended is not after.ended:
        _check_end(after, wrong)
    if workers:
        _check_back(after, workers, wrong)
    return wrong


def _changed(before: Mapping[int, T], after: Mapping[int, T]) -> list[int]:
    """Return the keys whose value was added, removed or replaced."""
    if before == after:
        return []
    replaced = map(is_not, map(before.get, after), after.values())
    return [*(before.keys() - after.keys()), *compress(after, replaced)]


def _is_in_view(state: JobState, number: int) -> bool:
    worker = state.workers.get(number)
    return worker is not None and worker.status in IN_VIEW


def validate_step(before: JobState, after: JobState, actions: tuple[Action, ...], reason: str) -> list[str]:
    """Return the invariants that one step has broken."""
    wrong = []
    if not reason.strip():
        wrong.append("invariant 9: a decision has no reason")
    if after.generation < before.generation:
        wrong.append(f"invariant 3: the generation went from {before.generation} to {after.generation}")
    if after.next_member < before.next_member:
        wrong.append("invariant 2: a member's number could be given twice")
    if before.phase is JobPhase.ENDED and (after is not before or actions):
        wrong.append("invariant 8: something was decided after the end")
    if actions or after.phase is not before.phase:
        _check_actions(before, after, actions, wrong)
    return wrong


def _check_actions(before: JobState, after: JobState, actions: tuple[Action, ...], wrong: list[str]) -> None:
    views = [action for action in actions if isinstance(action, InstallView)]
    if views and not all(
        view.plan.generation > before.generation
        or (before.phase is JobPhase.PREPARING and view.plan.generation == before.generation)
        for view in views
    ):
        wrong.append("invariant 3: a view was sent for a generation that was over")
    for view in views:
        wrong += _unmet(before, after, view.plan)
    if sum(isinstance(action, EndJob) for action in actions) != (after.phase is not before.phase) * (
        after.phase is JobPhase.ENDED
    ):
        wrong.append("invariant 8: EndJob is the step to ENDED, and nothing else is")
    if any(isinstance(action, EndJob) for action in actions[:-1]):
        wrong.append("invariant 8: something was decided after the end, in the step that ended the job")
    if before.stop_reason is not None and any(isinstance(action, StartWorker) for action in actions):
        wrong.append("invariant 8: a worker is started while the job stops")
    if any(isinstance(action, Send | ProbeWorkers) and not action.members for action in actions):
        wrong.append("invariant 9: a message or a probe is for no member")
    for dial in actions:
        if isinstance(dial, RequestDial) and any(
            not worker.reconnected
            for number in (dial.member, *dial.peers)
            if (worker := after.workers.get(number)) is not None
        ):
            wrong.append("invariant 10: a dial to or from a member whose endpoint is not known yet")


def _unmet(before: JobState, after: JobState, plan: ViewPlan) -> list[str]:
    """Return pairs of a new view that have not met, of which one was in no view before."""
    known = [after.workers[number] for number in plan.members if number in after.workers]
    return [
        f"invariant 10: members {new.number} and {other.number} are in a view and have not met"
        for new in known
        if not _is_in_view(before, new.number)
        for other in known
        if other is not new and not have_met(new, other)
    ]


def _check_view(state: JobState, wrong: list[str]) -> None:
    view = state.view
    if view is None:
        if state.phase in _WHOLE or state.phase is JobPhase.PREPARING:
            wrong.append(f"invariant 1: {state.phase.value} without a view")
        if in_view(state):
            wrong.append("invariant 1: a member of no view")
        return
    if state.phase is JobPhase.STARTING:
        wrong.append("invariant 1: a view while no member is left of it")
    if view.generation > state.generation:
        wrong.append(f"invariant 3: a view of generation {view.generation} in a job of {state.generation}")
    here = {worker.number for worker in in_view(state)}
    if state.phase in _WHOLE and here != set(view.members):
        wrong.append(f"invariant 1: in the view are {sorted(view.members)}, members are {sorted(here)}")
    if state.phase in _WHOLE and view.generation != state.generation:
        wrong.append(f"invariant 3: generation {state.generation} runs in the view of {view.generation}")


def wrong_plan(view: ViewPlan, shards: int) -> list[str]:
    """Return the invariants that a view breaks by itself."""
    wrong = []
    size = len(view.members)
    if size == 0 or len(set(view.members)) != size or len(view.slots) != size:
        wrong.append(f"invariant 1: members {view.members} with slots {view.slots}")
    if list(view.slots) != sorted(view.slots):
        wrong.append(f"invariant 1: ranks do not follow the slots: {view.slots}")
    # After a supervisor's restart the assignment may not be known: then it is empty, and stays the old one.
    if view.shards:
        assigned = sorted(shard for mine in view.shards for shard in mine)
        if len(view.shards) != size or assigned != list(range(shards)):
            wrong.append(f"invariant 4: {shards} shards are assigned as {view.shards}")
    behind = set(view.stale_indexes)
    if (view.source >= 0) != bool(behind) or view.source in behind or not behind <= set(range(size)):
        wrong.append(f"invariant 5: the source is {view.source}, behind are {view.stale_indexes}")
    if view.restore and view.source >= 0:
        wrong.append("invariant 5: a view that restores has a source")
    return wrong


def _check_workers(state: JobState, numbers: Collection[int], wrong: list[str]) -> None:
    """Check the invariants of these workers; workers that are gone have none."""
    found = [state.workers[number] for number in numbers if number in state.workers]
    if not found:
        return
    slots = {worker.slot for worker in found}
    holders: dict[int, list[int]] = {slot: [] for slot in slots}
    for worker in [one for one in state.workers.values() if one.slot in slots]:
        if not worker.leave_reason:
            holders[worker.slot].append(worker.number)
    for worker in found:
        number = worker.number
        if number >= state.next_member:
            wrong.append(f"invariant 2: member {number} was not numbered by the machine")
        if worker.status is not WorkerStatus.STARTING and number not in state.last_message_at:
            wrong.append(f"invariant 7: no last message of member {number} is noted")
        if worker.leave_reason and worker.status is WorkerStatus.MEMBER:
            wrong.append(f"invariant 2: member {number} has to leave and was not asked to")
        if not worker.leave_reason and holders[worker.slot] != [number]:
            wrong.append(f"invariant 2: slot {worker.slot} has members {holders[worker.slot]}")


def _check_slots(state: JobState, numbers: Iterable[int], wrong: list[str]) -> None:
    """Check the invariants of these slots; slots that are gone have none."""
    for number in numbers:
        slot = state.slots.get(number)
        if slot is None:
            continue
        if slot.worker is not None and slot.worker not in state.workers:
            wrong.append(f"invariant 2: slot {number} has member {slot.worker}, which is gone")
        waits = slot.worker is None and slot.start_at is None
        if slot.usable and waits and state.stop_reason is None and state.phase is not JobPhase.ENDED:
            wrong.append(f"invariant 6: slot {number} is forgotten")
        if slot.failures > state.settings.max_worker_failures and not slot.given_up:
            wrong.append(f"invariant 6: slot {number} failed {slot.failures} times and is not given up")
        if slot.given_up and slot.worker is not None:
            wrong.append(f"invariant 6: slot {number} is given up and has a worker")


def _check_waiting(state: JobState, wrong: list[str]) -> None:
    waits = state.phase in (JobPhase.PREPARING, JobPhase.INSTALLING)
    dials = state.phase is JobPhase.PREPARING and bool(state.pending_dials)
    if waits != bool(state.pending) and not dials:
        wrong.append(f"invariant 7: {state.phase.value} waits for {sorted(state.pending)}")
    lost = state.pending.difference(state.workers)
    if lost:
        wrong.append(f"invariant 7: waits for {sorted(lost)}, which are gone")
    if state.reports.keys() - state.workers.keys() or state.reports.keys() & state.pending:
        wrong.append("invariant 7: a report of a member that is gone or has not reported")
    if state.phase is JobPhase.PREPARING:
        silent = state.workers.keys() - state.pending - state.reports.keys()
        missing = sorted(number for number in silent if _is_in_view(state, number))
        if missing:
            wrong.append(f"invariant 7: members {missing} were not asked")


def _check_end(state: JobState, wrong: list[str]) -> None:
    over = state.phase is JobPhase.ENDED
    if state.phase is JobPhase.RUNNING and state.stop_reason is not None:
        wrong.append("invariant 8: the job was asked to stop, and its members were not")
    if over != (state.ended is not None):
        wrong.append("invariant 8: the end is not noted")
    if over == (state.next_tick_at < inf) and (state.workers or state.slots):
        wrong.append(f"invariant 7: {state.phase.value} and the next look is at {state.next_tick_at}")


def _check_back(state: JobState, numbers: Iterable[int], wrong: list[str]) -> None:
    """Check that no worker is relied on that did not reconnect after a restart."""
    if state.phase in (JobPhase.RETURNING, JobPhase.ENDED):
        return
    if any(_is_in_view(state, number) and not state.workers[number].reconnected for number in numbers):
        wrong.append("invariant 7: a member that did not come back is counted on")
