"""The laws of machine.py as checks: what is wrong with a state, or with a step from one to the next.

For tests and for the simulation, which ask after every event. Must not be needed for a decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import compress
from math import inf
from operator import is_not
from typing import TypeVar

from paceline.elastic.admission import have_met
from paceline.elastic.model import Action, EndJob, Phase, Standing, TellView, ViewPlan
from paceline.elastic.state import IN_VIEW, State, in_view

T = TypeVar("T")

_WHOLE = (Phase.INSTALLING, Phase.RUNNING, Phase.STOPPING)


def validate(state: State) -> list[str]:
    """The broken laws, each as a sentence; empty: all is well."""
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


def validate_change(before: State, after: State) -> list[str]:
    """As `validate(after)`, where `before` was well: only what the change could have broken is looked at, so
    that a heartbeat among a thousand workers costs little."""
    if before.phase is not after.phase or before.generation != after.generation or before.stop != after.stop:
        return validate(after)
    wrong: list[str] = []
    workers = _changed(before.workers, after.workers)
    slots = _changed(before.slots, after.slots)
    switched = any(_is_in_view(before, number) != _is_in_view(after, number) for number in workers)
    if before.view is not after.view or switched:
        _check_view(after, wrong)
    if before.view is not after.view and after.view is not None:
        wrong += wrong_plan(after.view, after.settings.shards)
    forgot = bool(workers) or len(after.heard) < len(before.heard)
    unheard = before.heard.keys() - after.heard.keys() if forgot else set()
    _check_workers(after, {*workers, *unheard}, wrong)
    left = {before.workers[number].slot for number in workers if number in before.workers}
    _check_slots(after, {*slots, *left}, wrong)
    if workers or before.waiting is not after.waiting or before.reports != after.reports:
        _check_waiting(after, wrong)
    if workers or slots or before.due != after.due or before.ended is not after.ended:
        _check_end(after, wrong)
    _check_back(after, workers, wrong)
    return wrong


def _changed(before: Mapping[int, T], after: Mapping[int, T]) -> list[int]:
    """Whose value came, went or is another one."""
    if before == after:
        return []
    replaced = map(is_not, map(before.get, after), after.values())
    return [*(before.keys() - after.keys()), *compress(after, replaced)]


def _is_in_view(state: State, number: int) -> bool:
    worker = state.workers.get(number)
    return worker is not None and worker.standing in IN_VIEW


def validate_step(before: State, after: State, actions: tuple[Action, ...], reason: str) -> list[str]:
    """What is wrong with one step."""
    wrong = []
    if not reason.strip():
        wrong.append("law 9: a decision has no reason")
    if after.generation < before.generation:
        wrong.append(f"law 3: the generation went from {before.generation} to {after.generation}")
    if after.next_member < before.next_member:
        wrong.append("law 2: a member's number could be given twice")
    if before.phase is Phase.ENDED and (after is not before or actions):
        wrong.append("law 8: something was decided after the end")
    views = [action for action in actions if isinstance(action, TellView)]
    if views and not all(
        view.plan.generation > before.generation or _answers(before, view.plan) for view in views
    ):
        wrong.append("law 3: a view was sent for a generation that was over")
    for view in views:
        wrong += _unmet(before, after, view.plan)
    if sum(isinstance(action, EndJob) for action in actions) != (after.phase is not before.phase) * (
        after.phase is Phase.ENDED
    ):
        wrong.append("law 8: EndJob is the step to ENDED, and nothing else is")
    return wrong


def _unmet(before: State, after: State, plan: ViewPlan) -> list[str]:
    """Pairs of a new view of which one was in no view before, and that have not met."""
    known = [after.workers[number] for number in plan.members if number in after.workers]
    return [
        f"law 10: members {new.number} and {other.number} are in a view and have not met"
        for new in known
        if not _is_in_view(before, new.number)
        for other in known
        if other is not new and not have_met(new, other)
    ]


def _answers(before: State, plan: ViewPlan) -> bool:
    return before.phase is Phase.PREPARING and plan.generation == before.generation


def _check_view(state: State, wrong: list[str]) -> None:
    view = state.view
    if view is None:
        if state.phase in _WHOLE or state.phase is Phase.PREPARING:
            wrong.append(f"law 1: {state.phase.value} without a view")
        if in_view(state):
            wrong.append("law 1: a member of no view")
        return
    if state.phase is Phase.STARTING:
        wrong.append("law 1: a view while nobody is left of it")
    if view.generation > state.generation:
        wrong.append(f"law 3: the view is of generation {view.generation}, the job of {state.generation}")
    here = {worker.number for worker in in_view(state)}
    if state.phase in _WHOLE and here != set(view.members):
        wrong.append(f"law 1: in the view are {sorted(view.members)}, members are {sorted(here)}")
    if state.phase in _WHOLE and view.generation != state.generation:
        wrong.append(f"law 3: generation {state.generation} runs in the view of {view.generation}")


def wrong_plan(view: ViewPlan, shards: int) -> list[str]:
    """What is wrong with a view in itself."""
    wrong = []
    size = len(view.members)
    if size == 0 or len(set(view.members)) != size or len(view.slots) != size:
        wrong.append(f"law 1: members {view.members} with slots {view.slots}")
    if list(view.slots) != sorted(view.slots):
        wrong.append(f"law 1: ranks do not follow the slots: {view.slots}")
    # After a supervisor's restart the deal may not be remembered: then it is empty, and stays the old one.
    if view.shards:
        dealt = sorted(shard for mine in view.shards for shard in mine)
        if len(view.shards) != size or dealt != list(range(shards)):
            wrong.append(f"law 4: {shards} shards are dealt as {view.shards}")
    behind = set(view.behind)
    if (view.source >= 0) != bool(behind) or view.source in behind or not behind <= set(range(size)):
        wrong.append(f"law 5: the source is {view.source}, behind are {view.behind}")
    if view.restore and view.source >= 0:
        wrong.append("law 5: a view that restores has a source")
    return wrong


def _check_workers(state: State, numbers: Collection[int], wrong: list[str]) -> None:
    """The laws of each of these workers; those that are gone have none."""
    found = [state.workers[number] for number in numbers if number in state.workers]
    if not found:
        return
    slots = {worker.slot for worker in found}
    holders: dict[int, list[int]] = {slot: [] for slot in slots}
    for worker in [one for one in state.workers.values() if one.slot in slots]:
        if not worker.leaves:
            holders[worker.slot].append(worker.number)
    for worker in found:
        number = worker.number
        if number >= state.next_member:
            wrong.append(f"law 2: member {number} was not numbered by the machine")
        if worker.standing is not Standing.STARTING and number not in state.heard:
            wrong.append(f"law 7: nobody listens to member {number}")
        if worker.leaves and worker.standing is Standing.MEMBER:
            wrong.append(f"law 2: member {number} is to leave and does not know")
        if not worker.leaves and holders[worker.slot] != [number]:
            wrong.append(f"law 2: slot {worker.slot} has members {holders[worker.slot]}")


def _check_slots(state: State, numbers: Iterable[int], wrong: list[str]) -> None:
    """The laws of each of these slots; those that are gone have none."""
    for number in numbers:
        slot = state.slots.get(number)
        if slot is None:
            continue
        if slot.worker is not None and slot.worker not in state.workers:
            wrong.append(f"law 2: slot {number} has member {slot.worker}, who is gone")
        waits = slot.worker is None and slot.starts_at is None
        if slot.usable and waits and state.stop is None and state.phase is not Phase.ENDED:
            wrong.append(f"law 6: slot {number} is forgotten")
        if slot.failures > state.settings.max_worker_failures and not slot.given_up:
            wrong.append(f"law 6: slot {number} failed {slot.failures} times and goes on")
        if slot.given_up and slot.worker is not None:
            wrong.append(f"law 6: slot {number} is given up and has a worker")


def _check_waiting(state: State, wrong: list[str]) -> None:
    waits = state.phase in (Phase.PREPARING, Phase.INSTALLING)
    dials = state.phase is Phase.PREPARING and bool(state.doubts)
    if waits != bool(state.waiting) and not dials:
        wrong.append(f"law 7: {state.phase.value} waits for {sorted(state.waiting)}")
    strangers = state.waiting.difference(state.workers)
    if strangers:
        wrong.append(f"law 7: waits for {sorted(strangers)}, who are gone")
    if state.reports.keys() - state.workers.keys() or state.reports.keys() & state.waiting:
        wrong.append("law 7: a report of somebody who is gone or has not reported")
    if state.phase is Phase.PREPARING:
        silent = state.workers.keys() - state.waiting - state.reports.keys()
        missing = sorted(number for number in silent if _is_in_view(state, number))
        if missing:
            wrong.append(f"law 7: members {missing} were not asked")


def _check_end(state: State, wrong: list[str]) -> None:
    over = state.phase is Phase.ENDED
    if over != (state.ended is not None):
        wrong.append("law 8: the end is not noted")
    if over == (state.due < inf) and (state.workers or state.slots):
        wrong.append(f"law 7: {state.phase.value} and the next look is at {state.due}")


def _check_back(state: State, numbers: Iterable[int], wrong: list[str]) -> None:
    """Of these workers nobody is counted on that did not come back to a supervisor that began again."""
    if state.phase in (Phase.RETURNING, Phase.ENDED):
        return
    if any(_is_in_view(state, number) and not state.workers[number].back for number in numbers):
        wrong.append("law 7: a member that did not come back is counted on")
