"""The machine's table as pictures and tables for people: docs/machine.md is kept up to date with it.

    python -m paceline.elastic.diagram docs/machine.md        writes the generated parts anew

Must not know anything that is not in the table, the settings or the laws.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from paceline.elastic import machine
from paceline.elastic.model import Phase, Settings

_PART = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def states() -> str:
    """A Mermaid state diagram: every way from one phase to another, with the events that lead there."""
    ways: dict[tuple[Phase, Phase], list[str]] = {}
    for row in machine.TABLE:
        for phase, leads in row.leads.items():
            for to in Phase:
                if to in leads and to is not phase:
                    ways.setdefault((phase, to), []).append(row.event.__name__)
    lines = ["stateDiagram-v2", "    [*] --> starting"]
    for before in Phase:
        for after in Phase:
            if (before, after) in ways:
                events = ", ".join(ways[before, after])
                lines.append(f"    {before.value} --> {after.value} : {events}")
    lines.append("    ended --> [*]")
    return _mermaid(lines)


def main_way() -> str:
    """The way of a job to which nothing but one failure happens, as far as the table allows it."""
    way = (
        (Phase.STARTING, "Joined", Phase.INSTALLING, "all workers came"),
        (Phase.INSTALLING, "HasInstalled", Phase.RUNNING, "all are in the view"),
        (Phase.RUNNING, "Lost", Phase.PREPARING, "a member failed, joins, leaves, is slow"),
        (Phase.PREPARING, "Reported", Phase.INSTALLING, "all reported, a new view"),
        (Phase.INSTALLING, "Lost", Phase.PREPARING, "another one failed"),
        (Phase.PREPARING, "Lost", Phase.STARTING, "nobody is left, restore"),
        (Phase.RUNNING, "StopAsked", Phase.STOPPING, "somebody wants to stop"),
        (Phase.RUNNING, "IsDone", Phase.ENDED, "all are done"),
        (Phase.STOPPING, "IsDone", Phase.ENDED, "all have saved"),
        (Phase.STARTING, "Began", Phase.RETURNING, "the supervisor began again"),
        (Phase.RETURNING, "Joined", Phase.RUNNING, "all members came back"),
        (Phase.RETURNING, "Ticked", Phase.PREPARING, "some did not"),
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
    """Every event and where it can lead, by phase; a dot: it changes nothing there."""
    phases = [phase for phase in Phase if phase is not Phase.ENDED]
    lines = [
        "| event | says | " + " | ".join(phase.value for phase in phases) + " |",
        "|---" * (len(phases) + 2) + "|",
    ]
    for row in machine.TABLE:
        cells = []
        for phase in phases:
            leads = row.leads.get(phase)
            others = [to.value for to in Phase if leads is not None and to in leads and to is not phase]
            cells.append("." if leads is None else ", ".join(others) or "stays")
        lines.append(f"| `{row.event.__name__}` | {row.says} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def laws() -> str:
    """The laws, as they stand at the top of machine.py."""
    text = machine.__doc__ or ""
    found = re.findall(r"^ ?(\d+)\. (.*?)(?=^ ?\d+\. |^$)", text, re.DOTALL | re.MULTILINE)
    return "".join(f"{number}. {' '.join(law.split())}\n" for number, law in found)


def settings() -> str:
    """What it decides by, with the defaults."""
    lines = ["| setting | default |", "|---|---|"]
    for one in fields(Settings):
        if isinstance(one.default, int | float | str):
            lines.append(f"| `{one.name}` | {one.default} |")
    return "\n".join(lines) + "\n"


PARTS: dict[str, Callable[[], str]] = {
    "states": states,
    "main_way": main_way,
    "table": table,
    "laws": laws,
    "settings": settings,
}


def rendered(page: str) -> str:
    """The page with its generated parts as they should be now."""
    return _PART.sub(lambda part: part[1] + PARTS[part[2]]() + part[3], page)


def _mermaid(lines: list[str]) -> str:
    return "```mermaid\n" + "\n".join(lines) + "\n```\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")
