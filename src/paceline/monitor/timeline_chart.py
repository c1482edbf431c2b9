"""The workers' timeline as SVG: a row per rank, a bar per process, marks for what happened.

From top to bottom: steps per second, the rows, a lane for checkpoints and supervisors, the axis. Rows become
lower as there are more of them, so that 128 fit on a page. Colours are CSS variables of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import final

from paceline.monitor.report_style import COLOURS
from paceline.monitor.svg_chart import Scale, round_step, rule, svg, text, tick_text
from paceline.monitor.timeline import RunTimeline, TimelineEvent, WorkerLifetime

_LEFT, _RIGHT, _TOP = 74, 16, 8
_SPEED, _GAP, _LANE, _AXIS = 44, 12, 22, 40
# (rows up to, height of each); a row below _NAMED_FROM has no room for its name.
_HEIGHTS = ((8, 28.0), (16, 20.0), (32, 14.0), (64, 9.0), (144, 6.0), (256, 4.0))
_LOWEST = 2.5
_NAMED_FROM = 14.0
_BINS = (24, 160)  # least and most
_STEPS_OF_BIN = 4
_MOST_VIEWS = 60
_INCARNATIONS = ("first process", "1st replacement", "2nd replacement", "3rd replacement")


def timeline_chart(made: RunTimeline, *, width: int) -> str:
    """Draw the chart, `width` pixels wide; a sentence if there is nothing to draw."""
    if not made.lifetimes or made.seconds <= 0.0:
        return '<p class="nothing">no worker was recorded</p>'
    return _Chart(made, width).svg()


def incarnations(made: RunTimeline) -> list[tuple[int, str]]:
    """Return the colours of the bars in the chart, with what they mean."""
    deepest = max((lifetime.incarnation for lifetime in made.lifetimes), default=-1)
    shown = [(number % COLOURS, _INCARNATIONS[number]) for number in range(min(deepest + 1, 4))]
    return shown + ([(4 % COLOURS, "later ones")] if deepest >= 4 else [])


@final
class _Chart:
    def __init__(self, made: RunTimeline, width: int) -> None:
        self._made = made
        self._x = Scale(0.0, made.seconds, _LEFT, width - _RIGHT)
        self._width = width
        self._ranks = sorted({lifetime.rank for lifetime in made.lifetimes})
        count = len(self._ranks)
        self._row = next((height for most, height in _HEIGHTS if count <= most), _LOWEST)
        self._rows = _TOP + _SPEED + _GAP
        self._lane = self._rows + count * self._row + 4
        self._bottom = self._lane + _LANE
        self._height = self._bottom + _AXIS

    def svg(self) -> str:
        parts = [
            *self._grid(),
            *self._speed(),
            *self._bands(),
            *self._names(),
            *(part for lifetime in self._made.lifetimes for part in self._bar(lifetime)),
            *self._marks(),
            *self._lane_marks(),
        ]
        return svg("timeline", parts, self._width, self._height, "workers by seconds")

    def _at(self, seconds: float) -> float:
        return self._x.at(min(max(seconds, 0.0), self._made.seconds))

    def _middle(self, rank: int) -> float:
        return self._rows + (self._ranks.index(rank) + 0.5) * self._row

    def _grid(self) -> list[str]:
        parts = []
        for value in self._x.ticks():
            at = self._x.at(value)
            parts += [
                rule("grid", at, _TOP, at, self._bottom),
                text("tick", at, self._bottom + 16, tick_text(value)),
            ]
        middle = (_LEFT + self._x.stop) / 2
        parts += [
            rule("axis", _LEFT, self._bottom, self._x.stop, self._bottom),
            text("label", middle, self._height - 5, "seconds since the first worker was ready"),
        ]
        for at in map(self._at, self._made.starts):
            cut_out = "<title>the run was started again; the time in between is cut out</title>"
            parts.append(f"<g>{cut_out}{rule('again', at, _TOP, at, self._bottom)}</g>")
        if len(self._made.views) <= _MOST_VIEWS:
            parts += [rule("view", at, self._rows, at, self._lane) for at in map(self._at, self._made.views)]
        return parts

    def _speed(self) -> list[str]:
        """Draw steps per second, which shows what a failure costs."""
        # With few steps in a bin the curve would show where bins begin.
        bins = min(max(len(self._made.commits) // _STEPS_OF_BIN, _BINS[0]), _BINS[1])
        width = self._made.seconds / bins
        counts = [0] * bins
        for commit in self._made.commits:
            counts[min(bins - 1, int(commit / width))] += 1
        # A bin of a few steps jumps by one of them; three together do not.
        windows = [counts[max(0, n - 1) : n + 2] for n in range(bins)]
        rates = [sum(window) / len(window) / width for window in windows]
        most = max(rates)
        if most <= 0.0:
            return []
        base = _TOP + _SPEED
        edge = round_step(most) if round_step(most) <= most else round_step(most / 2)
        y = Scale(0.0, most, base, _TOP + 4)
        points = [f"{self._at((n + 0.5) * width):.1f} {y.at(rate):.1f}" for n, rate in enumerate(rates)]
        outline = " L".join(points)
        left, right = self._at(0.5 * width), self._at((bins - 0.5) * width)
        return [
            f'<path class="speed" d="M{left:.1f} {base} L{outline} L{right:.1f} {base} Z"/>',
            f'<path class="speed-line" d="M{outline}"/>',
            text("tick", _LEFT - 8, y.at(edge) + 4, tick_text(edge), "end"),
            text("tick", _LEFT - 8, base + 3, "steps/s", "end"),
        ]

    def _bands(self) -> list[str]:
        parts = []
        for one in self._of("repaired"):
            start, stop = self._at(one.since if one.since is not None else one.time), self._at(one.time)
            width = max(1.5, stop - start)
            parts.append(
                f'<rect class="repair" x="{stop - width:.1f}" y="{_TOP}" width="{width:.1f}" '
                f'height="{self._lane - _TOP:.1f}">{self._title(one)}</rect>'
            )
        return parts

    def _names(self) -> list[str]:
        every = 1
        while every * self._row < _NAMED_FROM:
            every *= 2
        named = [
            (rank, "rank " if index == 0 or self._row >= 20 else "") for index, rank in enumerate(self._ranks)
        ]
        return [
            text("tick", _LEFT - 8, self._middle(rank) + 4, f"{word}{rank}", "end")
            for rank, word in named[::every]
        ]

    def _bar(self, lifetime: WorkerLifetime) -> list[str]:
        """Draw the bar of a process: pale until it is a member, full from then on."""
        end = self._made.seconds if lifetime.end is None else lifetime.end
        joined = lifetime.start if lifetime.joined is None and not self._made.views else lifetime.joined
        height = max(1.5, self._row * (0.62 if self._row >= _NAMED_FROM else 0.8))
        top = self._middle(lifetime.rank) - height / 2
        title = f"rank {lifetime.rank}, pid {lifetime.pid}"
        title += f" on {lifetime.host}" if lifetime.host else ""
        title += f": {lifetime.start:.2f} s to {end:.2f} s"
        title += f", member from {joined:.2f} s on" if joined is not None and joined > lifetime.start else ""
        title += f"; {lifetime.cause}: {lifetime.reason}" if lifetime.cause else ""
        colour = f"c{min(lifetime.incarnation, 4) % COLOURS}"
        radius = min(3.0, height / 3)
        parts = []
        for name, start, stop in (
            ("waits", lifetime.start, end if joined is None else joined),
            ("bar", joined, end),
        ):
            if start is None or (stop <= start and name == "waits"):
                continue
            left = self._at(start)
            width = max(1.0, self._at(stop) - left)
            parts.append(
                f'<rect class="{name} {colour}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{height:.1f}" rx="{min(radius, width / 2):.1f}">'
                f"<title>{escape(title)}</title></rect>"
            )
        return parts

    def _marks(self) -> list[str]:
        parts = []
        size = min(6.0, max(2.5, self._row * 0.24))
        # Failures last, on top of the others.
        for one in (*self._of("joined", "left"), *self._of("failed")):
            if one.rank is None:
                continue
            x, y = self._at(one.time), self._middle(one.rank)
            if one.kind == "failed":
                cross = _cross(x, y, size)
                drawn = f'<path class="halo" d="{cross}"/><path d="{cross}"/>'
                parts.append(f'<g class="failed">{self._title(one)}{drawn}</g>')
            else:
                corners = ((x - size, y - size), (x + size * 0.7, y), (x - size, y + size))
                parts.append(self._polygon(one, corners))
        return parts + (self._causes(size) if self._row >= 20 else [])

    def _causes(self, size: float) -> list[str]:
        """Write the cause at the end of each bar that a failure ended, if it has room."""
        parts = []
        for lifetime in self._made.lifetimes:
            if not lifetime.cause or lifetime.end is None or lifetime.joined is None:
                continue
            x, y = self._at(lifetime.end) - size - 5, self._middle(lifetime.rank) + 3.8
            # About six and a half pixels a letter.
            if x - 6.5 * len(lifetime.cause) > self._at(lifetime.joined) + 4:
                parts.append(text("cause", x, y, escape(lifetime.cause), "end"))
        return parts

    def _lane_marks(self) -> list[str]:
        y = self._lane + _LANE / 2
        parts = []
        for one in self._of("checkpoint"):
            x = self._at(one.time)
            parts.append(self._polygon(one, ((x, y - 4.5), (x + 4.5, y), (x, y + 4.5), (x - 4.5, y))))
        for one in self._of("supervisor"):
            parts.append(
                f'<circle class="supervisor" cx="{self._at(one.time):.1f}" cy="{y:.1f}" r="4.5">'
                f"{self._title(one)}</circle>"
            )
        for one in self._of("verdict"):
            parts.append(text("verdict-mark", self._at(one.time), y + 5, f"!{self._title(one)}"))
        return parts

    def _of(self, *kinds: str) -> Sequence[TimelineEvent]:
        return [one for one in self._made.events if one.kind in kinds]

    def _polygon(self, one: TimelineEvent, corners: Sequence[tuple[float, float]]) -> str:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        return f'<polygon class="{one.kind}" points="{points}">{self._title(one)}</polygon>'

    def _title(self, one: TimelineEvent) -> str:
        return f"<title>{escape(f'{one.time:.2f} s: {one.text}')}</title>"


def _cross(x: float, y: float, size: float) -> str:
    low_x, high_x, low_y, high_y = x - size, x + size, y - size, y + size
    falling = f"M{low_x:.1f} {low_y:.1f} L{high_x:.1f} {high_y:.1f}"
    return f"{falling} M{low_x:.1f} {high_y:.1f} L{high_x:.1f} {low_y:.1f}"
