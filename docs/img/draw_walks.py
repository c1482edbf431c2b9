"""Draw the pictures of docs/walks.md from the trees in it: `python docs/img/draw_walks.py`.

A tree is a text block after `<!-- walk: NAME -->`. A line in brackets begins a process or a thread, and says
what reaches it. Every other line is a call, below its caller by two spaces: `file.py:function  remark`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

PAGE = Path(__file__).parents[1] / "walks.md"
_WIDTH, _ROW, _INDENT, _LEFT, _REMARK = 1180, 21, 17, 26, 640
_COLOURS = {
    "frontends": "#8b5cf6",
    "monitor": "#a16207",
    "train": "#1d6fd1",
    "elastic": "#c2410c",
    "engines": "#9d174d",
    "checkpoint": "#0f766e",
    "data": "#4d7c0f",
    "comm": "#0e7490",
    "control": "#b45309",
    "core": "#57606a",
}


@dataclass(frozen=True)
class Call:
    """One call; `parent` is the index of its caller in the lane."""

    file: str
    function: str
    remark: str
    depth: int
    parent: int | None

    @property
    def is_port(self) -> bool:
        """Whether it goes through a port, a table or a thread: what the page marks with "via"."""
        return self.remark.startswith("via ")


@dataclass
class Lane:
    """One process or thread, and what it does in this walk."""

    title: str
    calls: list[Call] = field(default_factory=list)

    def callers(self, call: Call) -> Iterator[Call]:
        """Yield the chain of callers, nearest first."""
        parent = call.parent
        while parent is not None:
            yield self.calls[parent]
            parent = self.calls[parent].parent


def walks() -> dict[str, list[Lane]]:
    """Read the trees of the page, by name."""
    found = re.findall(
        r"<!-- walk: (\w+) -->.*?```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    return {name: _lanes(text) for name, text in found}


def _lanes(text: str) -> list[Lane]:
    lanes: list[Lane] = []
    for line in filter(str.strip, text.splitlines()):
        if line.startswith("["):
            lanes.append(Lane(line.strip("[]")))
            continue
        calls = lanes[-1].calls
        depth = (len(line) - len(line.lstrip())) // 2
        name, _, remark = line.strip().partition("  ")
        file, _, function = name.partition(":")
        parent = next((n for n in range(len(calls) - 1, -1, -1) if calls[n].depth < depth), None)
        calls.append(Call(file, function, remark.strip(), depth, parent))
    return lanes


def draw(name: str, lanes: list[Lane]) -> str:
    """Return the picture of one walk as SVG."""
    calls = [call for lane in lanes for call in lane.calls if call.parent is not None]
    through = sum(call.is_port for call in calls)
    marked = f'{through} calls "via FILE": a port, a row of a table, a thread'
    parts = [
        '<path class="hop" d="M20 20 H56"/>',
        f'<text class="remark" x="64" y="24">{len(calls) - through} direct calls</text>',
        '<path class="hop port" d="M220 20 H256"/>',
        f'<text class="remark" x="264" y="24">{marked}</text>',
    ]
    y = 40
    for number, lane in enumerate(lanes):
        height = 34 + _ROW * len(lane.calls)
        parts.append(f'<rect class="lane" x="8" y="{y}" width="{_WIDTH - 16}" height="{height}" rx="6"/>')
        parts.append(f'<text class="title" x="20" y="{y + 19}">{escape(lane.title)}</text>')
        if number:
            parts.append(f'<path class="cross" d="M{_LEFT - 10} {y - 12} v10 m-4 -5 l4 5 l4 -5"/>')
        rows = [y + 30 + _ROW * n for n in range(len(lane.calls))]
        for call, row in zip(lane.calls, rows, strict=True):
            parts += _row(call, row, None if call.parent is None else rows[call.parent])
        y += height + 14
    style = (
        "text{font:12px ui-monospace,Menlo,monospace;fill:#1f2328}.title{font:600 13px sans-serif}"
        ".remark{font:12px sans-serif;fill:#57606a}.lane{fill:#f6f8fa;stroke:#d0d7de}"
        ".hop{fill:none;stroke:#8c959f}.port{stroke:#c2255c;stroke-width:1.6;stroke-dasharray:4 3}"
        ".cross{fill:none;stroke:#1f2328;stroke-width:1.6}"
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y}" role="img" aria-label="{name}">'
    )
    ground = f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>'
    return "\n".join([head, f"<style>{style}</style>", ground, *parts, "</svg>", ""])


def _row(call: Call, y: int, above: int | None) -> list[str]:
    x = _LEFT + _INDENT * call.depth
    parts = []
    if above is not None:
        kind = "hop port" if call.is_port else "hop"
        parts.append(f'<path class="{kind}" d="M{x - _INDENT + 4} {above + 12} V{y + 4} H{x - 2}"/>')
    folder, _, rest = call.file.partition("/")
    parts.append(f'<circle cx="{x + 3}" cy="{y + 4}" r="3.5" fill="{_COLOURS.get(folder, "#57606a")}"/>')
    parts.append(
        f'<text x="{x + 11}" y="{y + 8}"><tspan fill="{_COLOURS.get(folder, "#57606a")}">{folder}/</tspan>'
        f'{escape(rest)} <tspan font-weight="700">{escape(call.function)}</tspan></text>'
    )
    if call.remark:
        parts.append(f'<text class="remark" x="{_REMARK}" y="{y + 8}">{escape(call.remark)}</text>')
    return parts


def main() -> None:
    for name, lanes in walks().items():
        Path(__file__).with_name(f"walk-{name}.svg").write_text(draw(name, lanes), encoding="utf-8")


if __name__ == "__main__":
    main()
