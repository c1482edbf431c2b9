"""The machine's table as pictures and tables for people: docs/machine.md is kept up to date with it.

python -m tests.elastic.machine.machine_page docs/machine.md        writes the generated parts anew
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from paceline.elastic.machine import machine
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.machine.state import JobPhase

_PART = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def states() -> str:
    """Return a Mermaid state diagram: every transition between phases, with the events that lead there."""
    ways: dict[tuple[JobPhase, JobPhase], list[str]] = {}
    for row in machine.TABLE:
        for phase, leads in row.leads.items():
            for to in JobPhase:
                if to in leads and to is not phase:
                    ways.setdefault((phase, to), []).append(row.event.__name__)
    lines = ["stateDiagram-v2", "    [*] --> starting"]
    for before in JobPhase:
        for after in JobPhase:
            if (before, after) in ways:
                events = ", ".join(ways[before, after])
                lines.append(f"    {before.value} --> {after.value} : {events}")
    lines.append("    ended --> [*]")
    return _mermaid(lines)


def main_way() -> str:
    """Return the path of a job with a single failure, as far as the table allows it."""
    way = (
        (JobPhase.STARTING, "MemberHello", JobPhase.INSTALLING, "all workers came"),
        (JobPhase.INSTALLING, "ViewInstalled", JobPhase.RUNNING, "all are in the view"),
        (JobPhase.RUNNING, "WorkerLost", JobPhase.PREPARING, "a member failed, joins, leaves, is slow"),
        (JobPhase.PREPARING, "MemberReport", JobPhase.INSTALLING, "all reported, a new view"),
        (JobPhase.INSTALLING, "WorkerLost", JobPhase.PREPARING, "another one failed"),
        (JobPhase.PREPARING, "WorkerLost", JobPhase.STARTING, "no member is left, restore"),
        (JobPhase.RUNNING, "StopRequested", JobPhase.STOPPING, "a stop is requested"),
        (JobPhase.RUNNING, "MemberFinished", JobPhase.ENDED, "all are done"),
        (JobPhase.STOPPING, "MemberFinished", JobPhase.ENDED, "all have saved"),
        (JobPhase.STARTING, "SupervisorBegan", JobPhase.RETURNING, "the supervisor began again"),
        (JobPhase.RETURNING, "MemberHello", JobPhase.RUNNING, "all members came back"),
        (JobPhase.RETURNING, "Tick", JobPhase.PREPARING, "some did not"),
    )
    leads = {(row.event.__name__, phase): to for row in machine.TABLE for phase, to in row.leads.items()}
    lines = ["stateDiagram-v2", "    direction LR", "    [*] --> starting"]
    for before, event, after, words in way:
        if after not in leads[event, before]:
            raise ValueError(f"the table does not lead from {before.value} to {after.value} by {event}")
        lines.append(f"    {before.value} --> {after.value} : {words}")
    lines.append("    ended --> [*]")
    return _mermaid(lines)


def table() -> str:
    """Return every event and where it can lead, by phase; a dot: it changes nothing there."""
    phases = [phase for phase in JobPhase if phase is not JobPhase.ENDED]
    lines = [
        "| event | says | " + " | ".join(phase.value for phase in phases) + " |",
        "|---" * (len(phases) + 2) + "|",
    ]
    for row in machine.TABLE:
        cells = []
        for phase in phases:
            leads = row.leads.get(phase)
            others = [to.value for to in JobPhase if leads is not None and to in leads and to is not phase]
            cells.append("." if leads is None else ", ".join(others) or "stays")
        lines.append(f"| `{row.event.__name__}` | {row.says} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def invariants() -> str:
    """Return the invariants, as they stand at the top of machine.py."""
    text = machine.__doc__ or ""
    found = re.findall(r"^ ?(\d+)\. (.*?)(?=^ ?\d+\. |^$)", text, re.DOTALL | re.MULTILINE)
    return "".join(f"{number}. {' '.join(invariant.split())}\n" for number, invariant in found)


def settings() -> str:
    """Return the settings with their defaults."""
    lines = ["| setting | default |", "|---|---|"]
    for one in fields(MachineSettings):
        if isinstance(one.default, int | float | str):
            lines.append(f"| `{one.name}` | {one.default} |")
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "states": states,
    "main_way": main_way,
    "table": table,
    "invariants": invariants,
    "settings": settings,
}


def rendered(page: str) -> str:
    """Return the page with its generated parts as they should be now."""
    return _PART.sub(lambda part: part[1] + PARTS[part[2]]() + part[3], page)


def _mermaid(lines: list[str]) -> str:
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
