"""The laws of machine.py as checks: what is wrong with a state, or with a step from one to the next.

For tests and for the simulation, which ask after every event. Must not be needed for a decision.
"""

from __future__ import annotations

from math import inf

from paceline.elastic.model import Action, EndJob, Phase, Standing, TellView, ViewPlan
from paceline.elastic.state import IN_VIEW, State, in_view

_WHOLE = (Phase.INSTALLING, Phase.RUNNING, Phase.STOPPING)


def validate(state: State) -> list[str]:
    """The broken laws, each as a sentence; empty: all is well."""
    wrong: list[str] = []
    _check_view(state, wrong)
    _check_seats(state, wrong)
    _check_waiting(state, wrong)
    _check_end(state, wrong)
    return wrong


def validate_change(before: State, after: State) -> list[str]:
    """As `validate(after)`, where `before` was well: only what a change could have broken is looked at."""
    wrong: list[str] = []
    if before.workers != after.workers or before.slots != after.slots or before.stop is not after.stop:
        return validate(after)
    moved = before.phase is not after.phase or before.generation != after.generation
    if moved or before.view is not after.view:
        _check_view(after, wrong)
    if moved:
        _check_seats(after, wrong)
    if moved or before.waiting is not after.waiting or before.reports != after.reports:
        _check_waiting(after, wrong)
    if moved or before.due != after.due or before.heard.keys() != after.heard.keys():
        _check_end(after, wrong)
    return wrong


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
    if sum(isinstance(action, EndJob) for action in actions) != (after.phase is not before.phase) * (
        after.phase is Phase.ENDED
    ):
        wrong.append("law 8: EndJob is the step to ENDED, and nothing else is")
    return wrong


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
    wrong += wrong_plan(view, state.settings.shards)
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


def _check_seats(state: State, wrong: list[str]) -> None:
    seated: dict[int, int] = {}
    for worker in state.workers.values():
        if worker.number >= state.next_member:
            wrong.append(f"law 2: member {worker.number} was not numbered by the machine")
        if worker.standing is not Standing.STARTING and worker.number not in state.heard:
            wrong.append(f"law 7: nobody listens to member {worker.number}")
        if worker.leaves and worker.standing is Standing.MEMBER:
            wrong.append(f"law 2: member {worker.number} is to leave and does not know")
        if not worker.leaves:
            if worker.slot in seated:
                wrong.append(
                    f"law 2: slot {worker.slot} has members {seated[worker.slot]} and {worker.number}"
                )
            seated[worker.slot] = worker.number
    for slot in state.slots.values():
        if slot.worker is not None and slot.worker not in state.workers:
            wrong.append(f"law 2: slot {slot.number} has member {slot.worker}, who is gone")
        waits = slot.worker is None and slot.starts_at is None
        if slot.usable and waits and state.stop is None and state.phase is not Phase.ENDED:
            wrong.append(f"law 6: slot {slot.number} is forgotten")
        if slot.failures > state.settings.max_worker_failures and not slot.given_up:
            wrong.append(f"law 6: slot {slot.number} failed {slot.failures} times and goes on")
        if slot.given_up and slot.worker is not None:
            wrong.append(f"law 6: slot {slot.number} is given up and has a worker")


def _check_waiting(state: State, wrong: list[str]) -> None:
    waits = state.phase in (Phase.PREPARING, Phase.INSTALLING)
    if waits != bool(state.waiting):
        wrong.append(f"law 7: {state.phase.value} waits for {sorted(state.waiting)}")
    strangers = [number for number in state.waiting if number not in state.workers]
    if strangers:
        wrong.append(f"law 7: waits for {strangers}, who are gone")
    if any(number not in state.workers or number in state.waiting for number in state.reports):
        wrong.append("law 7: a report of somebody who is gone or has not reported")
    if state.phase is Phase.PREPARING:
        missing = [
            worker.number
            for worker in in_view(state)
            if worker.number not in state.waiting and worker.number not in state.reports
        ]
        if missing:
            wrong.append(f"law 7: members {missing} were not asked")


def _check_end(state: State, wrong: list[str]) -> None:
    over = state.phase is Phase.ENDED
    if over != (state.ended is not None):
        wrong.append("law 8: the end is not noted")
    if over == (state.due < inf) and (state.workers or state.slots):
        wrong.append(f"law 7: {state.phase.value} and the next look is at {state.due}")
    if any(worker.standing in IN_VIEW and not worker.back for worker in state.workers.values()) and (
        state.phase not in (Phase.RETURNING, Phase.ENDED)
    ):
        wrong.append("law 7: a member that did not come back is counted on")
