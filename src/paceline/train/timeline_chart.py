"""The workers' timeline as SVG: a row per rank, a bar per process, marks for what happened.

From top to bottom: steps per second, the rows, a lane for checkpoints and supervisors, the axis. Rows become
lower as there are more of them, so that 128 fit on a page. Colours are CSS variables of the page. Must not
know where a timeline comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import final

from paceline.train.report_style import COLOURS
from paceline.train.svg_chart import Scale, round_step, tick_text
from paceline.train.timeline import Happening, Life, Timeline

_LEFT, _RIGHT, _TOP = 74, 16, 8
_SPEED, _GAP, _LANE, _AXIS = 44, 12, 22, 40
# Up to so many rows they are this high; a row in small print cannot have a name of its own.
_HEIGHTS = ((8, 28.0), (16, 20.0), (32, 14.0), (64, 9.0), (144, 6.0), (256, 4.0))
_LOWEST = 2.5
_NAMED_FROM = 14.0
_BINS = (24, 160)  # least and most
_STEPS_OF_BIN = 4
_MOST_VIEWS = 60
_INCARNATIONS = ("first process", "1st replacement", "2nd replacement", "3rd replacement")


def timeline_chart(made: Timeline, *, width: int) -> str:
    """The chart, `width` pixels wide; a sentence where there is nothing to draw."""
    if not made.lives or made.seconds <= 0.0:
        return '<p class="nothing">no worker was recorded</p>'
    return _Chart(made, width).svg()


def incarnations(made: Timeline) -> list[tuple[int, str]]:
    """Colours of the bars that there are, with what they mean."""
    deepest = max((life.incarnation for life in made.lives), default=-1)
    shown = [(number % COLOURS, _INCARNATIONS[number]) for number in range(min(deepest + 1, 4))]
    return shown + ([(4 % COLOURS, "later ones")] if deepest >= 4 else [])


@final
class _Chart:
    def __init__(self, made: Timeline, width: int) -> None:
        self._made = made
        self._x = Scale(0.0, made.seconds, _LEFT, width - _RIGHT)
        self._width = width
        self._ranks = made.ranks
        count = len(self._ranks)
        self._row = next((height for most, height in _HEIGHTS if count <= most), _LOWEST)
        self._rows = _TOP + _SPEED + _GAP
        self._lane = self._rows + count * self._row + 4
        self._bottom = self._lane + _LANE
        self._height = self._bottom + _AXIS

    def svg(self) -> str:
        parts = [
            f'<svg class="timeline" viewBox="0 0 {self._width} {self._height:.0f}" role="img" '
            'aria-label="workers by seconds" preserveAspectRatio="xMidYMid meet">',
            *self._grid(),
            *self._speed(),
            *self._bands(),
            *self._names(),
            *(part for life in self._made.lives for part in self._bar(life)),
            *self._marks(),
            *self._lane_marks(),
            "</svg>",
        ]
        return "\n".join(parts)

    def _at(self, seconds: float) -> float:
        return self._x.at(min(max(seconds, 0.0), self._made.seconds))

    def _middle(self, rank: int) -> float:
        return self._rows + (self._ranks.index(rank) + 0.5) * self._row

    def _grid(self) -> list[str]:
        parts = []
        for value in self._x.ticks():
            at = self._x.at(value)
            parts.append(
                f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{self._bottom:.1f}"/>'
            )
            parts.append(
                f'<text class="tick" x="{at:.1f}" y="{self._bottom + 16:.1f}" text-anchor="middle">'
                f"{tick_text(value)}</text>"
            )
        middle = (_LEFT + self._x.stop) / 2
        parts.append(
            f'<line class="axis" x1="{_LEFT}" x2="{self._x.stop}" y1="{self._bottom:.1f}" '
            f'y2="{self._bottom:.1f}"/>'
        )
        parts.append(
            f'<text class="label" x="{middle:.0f}" y="{self._height - 5:.0f}" text-anchor="middle">'
            "seconds since the first worker was ready</text>"
        )
        for start in self._made.starts:
            at = self._at(start)
            parts.append(
                "<g><title>the run was started again; the time in between is cut out</title>"
                f'<line class="again" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{self._bottom:.1f}"/></g>'
            )
        if len(self._made.views) <= _MOST_VIEWS:
            parts += [
                f'<line class="view" x1="{self._at(view):.1f}" x2="{self._at(view):.1f}" '
                f'y1="{self._rows:.1f}" y2="{self._lane:.1f}"/>'
                for view in self._made.views
            ]
        return parts

    def _speed(self) -> list[str]:
        """Steps per second: how little a failure costs is seen here."""
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
            f'<text class="tick" x="{_LEFT - 8}" y="{y.at(edge) + 4:.1f}" text-anchor="end">'
            f"{tick_text(edge)}</text>",
            f'<text class="tick" x="{_LEFT - 8}" y="{base + 3}" text-anchor="end">steps/s</text>',
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
        return [
            f'<text class="tick" x="{_LEFT - 8}" y="{self._middle(rank) + 4:.1f}" text-anchor="end">'
            f"{'rank ' if index == 0 or self._row >= 20 else ''}{rank}</text>"
            for index, rank in enumerate(self._ranks)
            if index % every == 0
        ]

    def _bar(self, life: Life) -> list[str]:
        """Pale until it is a member, full from then on."""
        end = self._made.seconds if life.end is None else life.end
        joined = life.start if life.joined is None and not self._made.views else life.joined
        height = max(1.5, self._row * (0.62 if self._row >= _NAMED_FROM else 0.8))
        top = self._middle(life.rank) - height / 2
        title = f"rank {life.rank}, pid {life.pid}"
        title += f" on {life.host}" if life.host else ""
        title += f": {life.start:.2f} s to {end:.2f} s"
        title += f", member from {joined:.2f} s on" if joined is not None and joined > life.start else ""
        title += f"; {life.cause}: {life.reason}" if life.cause else ""
        colour = f"c{min(life.incarnation, 4) % COLOURS}"
        radius = min(3.0, height / 3)
        parts = []
        for name, start, stop in (
            ("waits", life.start, end if joined is None else joined),
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
        for one in self._of("joined", "left"):
            if one.rank is None:
                continue
            x, y = self._at(one.time), self._middle(one.rank)
            points = (
                f"{x - size:.1f},{y - size:.1f} {x + size * 0.7:.1f},{y:.1f} {x - size:.1f},{y + size:.1f}"
            )
            parts.append(f'<polygon class="{one.kind}" points="{points}">{self._title(one)}</polygon>')
        for one in self._of("failed"):
            if one.rank is None:
                continue
            x, y = self._at(one.time), self._middle(one.rank)
            parts.append(
                f'<g class="failed">{self._title(one)}'
                f'<path class="halo" d="{_cross(x, y, size)}"/><path d="{_cross(x, y, size)}"/></g>'
            )
        return parts + (self._causes(size) if self._row >= 20 else [])

    def _causes(self, size: float) -> list[str]:
        """A word at the end of each bar that a failure ended, where it has room."""
        parts = []
        for life in self._made.lives:
            if not life.cause or life.end is None or life.joined is None:
                continue
            x, y = self._at(life.end) - size - 5, self._middle(life.rank) + 3.8
            # About six and a half pixels a letter.
            if x - 6.5 * len(life.cause) > self._at(life.joined) + 4:
                where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="end"'
                parts.append(f'<text class="cause" {where}>{escape(life.cause)}</text>')
        return parts

    def _lane_marks(self) -> list[str]:
        y = self._lane + _LANE / 2
        parts = []
        for one in self._of("checkpoint"):
            x = self._at(one.time)
            points = (
                f"{x:.1f},{y - 4.5:.1f} {x + 4.5:.1f},{y:.1f} {x:.1f},{y + 4.5:.1f} {x - 4.5:.1f},{y:.1f}"
            )
            parts.append(f'<polygon class="checkpoint" points="{points}">{self._title(one)}</polygon>')
        for one in self._of("supervisor"):
            parts.append(
                f'<circle class="supervisor" cx="{self._at(one.time):.1f}" cy="{y:.1f}" r="4.5">'
                f"{self._title(one)}</circle>"
            )
        for one in self._of("verdict"):
            x = self._at(one.time)
            parts.append(
                f'<text class="verdict-mark" x="{x:.1f}" y="{y + 5:.1f}" text-anchor="middle">!'
                f"{self._title(one)}</text>"
            )
        return parts

    def _of(self, *kinds: str) -> Sequence[Happening]:
        return [one for one in self._made.happenings if one.kind in kinds]

    def _title(self, one: Happening) -> str:
        return f"<title>{escape(f'{one.time:.2f} s: {one.text}')}</title>"


def _cross(x: float, y: float, size: float) -> str:
    low_x, high_x, low_y, high_y = x - size, x + size, y - size, y + size
    falling = f"M{low_x:.1f} {low_y:.1f} L{high_x:.1f} {high_y:.1f}"
    return f"{falling} M{low_x:.1f} {high_y:.1f} L{high_x:.1f} {low_y:.1f}"
