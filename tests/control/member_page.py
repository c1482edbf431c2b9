"""The table of docs/member.md, drawn by asking the machine: each event in each phase.

python -m tests.control.member_page docs/member.md        writes the generated part anew
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.control.member_driver import (
    IN_EVERY_PHASE,
    PATIENCE,
    Driver,
    abort,
    accepted,
    exception,
    failure,
    finished,
    opening,
    prepare,
    view,
)

from paceline.control.member_state import (
    CodeRaised,
    GroupLeft,
    LeaveRequested,
    MemberAction,
    MemberEvent,
    MemberPhase,
    RunFinished,
    SendMessage,
    StateReady,
    SupervisorAway,
    ViewOpened,
)
from paceline.control.messages import Dismissed, Stop

# A member is in generation 1, or opens it; generation 2 follows.
EVENTS: dict[str, MemberEvent] = {
    "MemberAccepted": accepted(),
    "Prepare, to pause": prepare(2),
    "Prepare, to abort": abort(2),
    "Prepare or View of a stale generation": abort(0),
    "View": view(2),
    "Stop": Stop(reason="stop"),
    "Dismissed": Dismissed(reason="dismissed"),
    "ViewOpened": ViewOpened(),
    "StateReady": StateReady((1, 0, 0)),
    "GroupLeft, nothing failed": GroupLeft(),
    "GroupLeft, a collective failed": GroupLeft(failure(1)),
    "RunFinished": RunFinished(finished(1)),
    "CodeRaised, with a state": CodeRaised(exception(holds=True)),
    "CodeRaised, without": CodeRaised(exception(holds=False)),
    "LeaveRequested": LeaveRequested("SIGTERM"),
    "SupervisorAway, for less than its patience": SupervisorAway(-1.0),
    "SupervisorAway, for longer": SupervisorAway(-PATIENCE - 1.0),
    "SupervisorAway, blocked as long": SupervisorAway(-PATIENCE - 1.0, blocked_since=-PATIENCE - 1.0),
}


def _driver(phase: MemberPhase, event: MemberEvent) -> Driver:
    if phase is MemberPhase.OPENING and isinstance(event, StateReady):
        driver = opening()
        driver.feed(ViewOpened())
        return driver
    return IN_EVERY_PHASE[phase]()


def _name(action: MemberAction) -> str:
    return type(action.message).__name__ if isinstance(action, SendMessage) else type(action).__name__


def table() -> str:
    """A line for each event, a column for each phase: what is done, and the phase that follows."""
    phases = list(IN_EVERY_PHASE)
    lines = [
        "| event | " + " | ".join(phase.value for phase in phases) + " |",
        "|---" * (len(phases) + 1) + "|",
    ]
    for name, event in EVENTS.items():
        cells = []
        for phase in phases:
            driver = _driver(phase, event)
            before = driver.state
            done = ", ".join(_name(action) for action in driver.feed(event))
            leads = "" if driver.phase is phase else f"**{driver.phase.value}**"
            kept = "" if done or leads or driver.state is before else "is kept"
            cells.append("; ".join(part for part in (done, leads, kept) if part) or "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rendered(page: str) -> str:
    """The page with its generated part as it has to be."""
    part = f"<!-- begin table -->\n{table()}\n<!-- end table -->"
    return re.sub(r"<!-- begin table -->.*?<!-- end table -->", lambda _: part, page, flags=re.DOTALL)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(rendered(page.read_text(encoding="utf-8")), encoding="utf-8")
