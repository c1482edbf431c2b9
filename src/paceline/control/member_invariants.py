"""Check what must hold after every step of the member machine; each rule in the words of its violation.

The simulation checks each simulated member, the random walks of the tests check the machine alone.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    invited = 0 if after.invited is None else after.invited.generation
    rules = {
        "a worker that has ended does something": before.ended and (after is not before or bool(actions)),
        "a generation goes back": after.generation < before.generation
        or (before.invited is not None and invited < before.invited.generation),
        "a view is opened that was not accepted": after.generation > invited,
        "the worker is no member of its view": after.invited is not None
        and after.member not in after.invited.members,
        "a request to stop is kept that its view has answered": after.prepare is not None
        and after.prepare.generation <= invited,
        "the worker is in a view without a state": after.phase in (_P.IN_VIEW, _P.FINISHED)
        and not after.has_state,
        "the worker is in another view than the one it accepted": after.phase in (_P.IN_VIEW, _P.FINISHED)
        and after.view is not after.invited,
        "a finished worker ignores a request to stop": after.phase is _P.FINISHED
        and after.prepare is not None,
        "an abort does not interrupt": after.phase in _IN_GROUP
        and after.prepare is not None
        and after.prepare.abort
        and after.interrupted is None,
        "the worker ends without an exit": after.ended
        and not before.ended
        and before.phase is not after.phase
        and not _has(actions, Exit)
        and not _has(actions, SendMessage),
        "the worker exits and goes on": _has(actions, Exit) and not after.ended,
    }
    # Nearly always none is: `in` finds that out faster than a loop, and this runs after each simulated event.
    broken = [rule for rule, is_broken in rules.items() if is_broken] if True in rules.values() else []
    for action in actions:
        _check_action(before, after, action, broken)
    return broken


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


def _has(actions: Sequence[MemberAction], kind: type[MemberAction]) -> bool:
    return any(isinstance(action, kind) for action in actions)
