"""The workers' timeline as a part of a report: the chart, what its colours and marks mean, and what happened
as a list, for paper and for people who do not see the chart.

Must not know how a report is put together.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from paceline.core import journal
from paceline.core.events import Event
from paceline.train.timeline import Happening, Timeline, timeline
from paceline.train.timeline_chart import incarnations, timeline_chart

Journal: TypeAlias = "str | os.PathLike[str] | Iterable[Event]"
"""A run's folder, its journal's file, or events."""

_WIDE = 1040
_LISTED = 24
_GOOD, _BAD = ("joined", "repaired"), ("failed", "verdict")
_KEYS = (
    ("failed", "a worker fails", '<g class="failed"><path d="M2 2 L10 10 M2 10 L10 2"/></g>'),
    ("repaired", "until it is repaired", '<rect class="repair" x="2" y="0" width="8" height="12"/>'),
    ("joined", "joins", '<polygon class="joined" points="2,1 10,6 2,11"/>'),
    ("left", "leaves", '<polygon class="left" points="2,1 10,6 2,11"/>'),
    ("checkpoint", "checkpoint", '<polygon class="checkpoint" points="6,1 11,6 6,11 1,6"/>'),
    ("supervisor", "supervisor", '<circle class="supervisor" cx="6" cy="6" r="4.5"/>'),
    ("verdict", "verdict", '<text class="verdict-mark" x="6" y="11" text-anchor="middle">!</text>'),
)


def timeline_figures(journals: Sequence[Journal | None], names: Sequence[str]) -> list[str]:
    """One figure per journal in which a worker started."""
    figures = []
    for given, name in zip(journals, names, strict=False):
        made = Timeline() if given is None else timeline(_events(given))
        if made.lives:
            figures.append(_figure(made, f"Workers of {name}" if len(names) > 1 else "Workers"))
    return figures


def _events(given: Journal) -> Iterable[Event]:
    if not isinstance(given, str | os.PathLike):
        return given
    path = Path(given)
    return journal.iterate(path / "journal.jsonl" if path.is_dir() else path)


def _figure(made: Timeline, title: str) -> str:
    keys = [
        f'<span class="key"><span class="dot c{colour}"></span>{text}</span>'
        for colour, text in incarnations(made)
    ]
    kinds = {one.kind for one in made.happenings}
    keys += [
        f'<span class="key"><svg viewBox="0 0 12 12" aria-hidden="true">{drawing}</svg>{text}</span>'
        for kind, text, drawing in _KEYS
        if kind in kinds
    ]
    return (
        f'<figure class="wide"><h2>{escape(title)}</h2><div class="legend">{"".join(keys)}</div>'
        f"{timeline_chart(made, width=_WIDE)}{_list(made)}</figure>"
    )


def _list(made: Timeline) -> str:
    """What happened, without what happens all the time; of very much only the first, and how much more."""
    told = [one for one in made.happenings if one.kind not in ("checkpoint", "ended")]
    # A run to which nothing happened needs no list.
    if all(one.kind == "supervisor" for one in told):
        return ""
    items = [
        f'<li><span class="when">{one.time:.2f} s</span>'
        f'<span class="{_tone(one)}">{escape(_short(one.text))}</span></li>'
        for one in told[:_LISTED]
    ]
    if len(told) > _LISTED:
        rest = Counter(one.kind for one in told[_LISTED:])
        more = ", ".join(f"{count} {kind}" for kind, count in rest.most_common())
        items.append(f'<li><span class="when">then</span><span>{more}</span></li>')
    return f'<ul class="happened">{"".join(items)}</ul>'


def _tone(one: Happening) -> str:
    return "good" if one.kind in _GOOD else "bad" if one.kind in _BAD else "plain"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:157] + "..."
