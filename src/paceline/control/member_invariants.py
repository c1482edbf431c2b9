"""Check what must hold after every step of the member machine; each rule in the words of its violation.

The simulation checks each simulated member, the random walks of the tests check the machine alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import UnionType

from paceline.control.member_state import (
    Exit,
    Interrupt,
    MemberAction,
    MemberPhase,
    MemberState,
    OpenView,
    SendMessage,
    SendReport,
    SendState,
    Train,
)
from paceline.control.messages import ViewInstalled

_P = MemberPhase
_IN_GROUP = (_P.OPENING, _P.IN_VIEW)


def violations(before: MemberState, after: MemberState, actions: Sequence[MemberAction]) -> list[str]:
    """Return the rules that a step from `before` to `after` has broken."""
    if after is before and not actions:
        return []
    broken: list[str] = []
    _check_generations(before, after, broken)
    _check_phase(after, broken)
    if before.ended or after.ended or actions:
        _check_end(before, after, actions, broken)
    for action in actions:
        _check_action(before, after, action, broken)
    return broken


def _check_generations(before: MemberState, after: MemberState, broken: list[str]) -> None:
    invited = 0 if after.invited is None else after.invited.generation
    if after.generation < before.generation or (
        before.invited is not None and invited < before.invited.generation
    ):
        broken.append("a generation goes back")
    if after.generation > invited:
        broken.append("a view is opened that was not accepted")
    if after.invited is not None and after.member not in after.invited.members:
        broken.append("the worker is no member of its view")
    if after.prepare is not None and after.prepare.generation <= invited:
        broken.append("a request to stop is kept that its view has answered")


def _check_phase(after: MemberState, broken: list[str]) -> None:
    phase, prepare = after.phase, after.prepare
    if phase is _P.IN_VIEW or phase is _P.FINISHED:
        if not after.has_state:
            broken.append("the worker is in a view without a state")
        if after.view is not after.invited:
            broken.append("the worker is in another view than the one it accepted")
    if prepare is not None:
        if phase is _P.FINISHED:
            broken.append("a finished worker ignores a request to stop")
        if phase in _IN_GROUP and prepare.abort and after.interrupted is None:
            broken.append("an abort does not interrupt")


def _check_end(
    before: MemberState, after: MemberState, actions: Sequence[MemberAction], broken: list[str]
) -> None:
    if before.ended:
        broken.append("a worker that has ended does something")
    elif after.ended and before.phase is not after.phase and not _has(actions, Exit | SendMessage):
        broken.append("the worker ends without an exit")
    if not after.ended and _has(actions, Exit):
        broken.append("the worker exits and continues")


def _check_action(before: MemberState, after: MemberState, action: MemberAction, broken: list[str]) -> None:
    match action:
        case SendReport(generation) if after.phase is not _P.WAITING or generation <= after.generation:
            broken.append(f"a report for generation {generation} while {after.phase.value}")
        case OpenView(view) if after.phase is not _P.OPENING or after.invited is not view:
            broken.append(f"generation {view.generation} is opened while {after.phase.value}")
        case SendMessage(ViewInstalled(generation=generation)) if (
            after.phase is not _P.IN_VIEW or generation != after.generation
        ):
            broken.append(f"generation {generation} is called installed while {after.phase.value}")
        case SendState() if not before.has_state:
            broken.append("a state is sent that the worker does not hold")
        case Train() if after.phase is not _P.IN_VIEW:
            broken.append(f"the worker trains while {after.phase.value}")
        case Interrupt() if before.phase not in _IN_GROUP:
            broken.append(f"an interrupt while {before.phase.value}")


def _has(actions: Sequence[MemberAction], kind: type[MemberAction] | UnionType) -> bool:
    return any(isinstance(action, kind) for action in actions)
