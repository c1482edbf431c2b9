"""A line chart as SVG text: axes with round numbers, several lines, nothing to install.

Lines that lie on top of each other stay visible: earlier ones are wider, later ones run inside of them.
Colours are CSS variables of the page (--line-0, --grid, --text), so that a chart follows light and dark. Must
not know what is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from paceline.train.curves import Curve

HEIGHT = 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 42
_TICKS = 5
_WIDEST, _NARROWEST = 6.0, 2.0
# From this ratio of the largest to the smallest value on, equal factors are equal distances.
_LOG_FROM = 200.0


@final
@dataclass(frozen=True)
class Line:
    """One line; `faint` is drawn behind it (what was smoothed), `marks` puts a dot at every point."""

    label: str
    colour: int
    curve: Curve
    faint: Curve | None = None
    marks: bool = False
    dashed: bool = False


@final
@dataclass(frozen=True)
class Scale:
    """An axis: values from `low` to `high` lie between the pixels `start` and `stop`."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            every = max(1, (last - first) // _TICKS)
            return [10.0**power for power in range(first, last + 1, every)]
        step = round_step((self.high - self.low) / _TICKS)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def line_chart(lines: Sequence[Line], *, x_label: str, y_label: str, width: int) -> str:
    """The chart of the lines that have a point; `width` is that of the place it is for, in pixels."""
    drawn = [line for line in lines if line.curve]
    if not drawn:
        return '<p class="nothing">nothing was recorded</p>'
    x = _x_scale([value for line in drawn for value in line.curve.x], width)
    y = _y_scale(
        [value for line in drawn for curve in (line.curve, line.faint) if curve for value in curve.y]
    )
    parts = [
        f'<svg viewBox="0 0 {width} {HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} by {escape(x_label)}" preserveAspectRatio="xMidYMid meet">'
    ]
    parts += _axes(x, y, x_label, y_label)
    for line in drawn:
        if line.faint is not None:
            parts.append(_path(line.faint, x, y, f'class="faint c{line.colour}"'))
    for index, line in enumerate(drawn):
        share = 0.0 if len(drawn) == 1 else 1.0 - index / (len(drawn) - 1)
        thick = _NARROWEST + share * (_WIDEST - _NARROWEST)
        dash = ' stroke-dasharray="7 5"' if line.dashed else ""
        parts.append(_path(line.curve, x, y, f'class="line c{line.colour}" stroke-width="{thick:g}"{dash}'))
        if line.marks:
            parts += _marks(line, x, y, thick)
    return "\n".join([*parts, "</svg>"])


def _x_scale(values: Sequence[float], width: int) -> Scale:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1.0, high + 1.0
    # A run is drawn from its beginning, unless it went on from somewhere far away.
    elif low <= 0.5 * high:
        low = 0.0
    return Scale(low, high, _LEFT, width - _RIGHT)


def _y_scale(values: Sequence[float]) -> Scale:
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    start, stop = HEIGHT - _BOTTOM, _TOP
    if low > 0.0 and high / low >= _LOG_FROM:
        return Scale(low / 1.1, high * 1.1, start, stop, log=True)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return Scale(low - margin, high + margin, start, stop)
    # Zero is shown when it is near: how far a loss still is from it says something.
    if 0.0 < low <= 0.5 * high:
        return Scale(0.0, 1.05 * high, start, stop)
    margin = 0.06 * (high - low)
    return Scale(low - margin, high + margin, start, stop)


def round_step(rough: float) -> float:
    """The round number (1, 2 or 5 times a power of ten) nearest to this one."""
    power = 10.0 ** math.floor(math.log10(rough))
    return min((step * power for step in (1.0, 2.0, 5.0, 10.0)), key=lambda step: abs(math.log(step / rough)))


def _axes(x: Scale, y: Scale, x_label: str, y_label: str) -> list[str]:
    parts = []
    bottom, right = HEIGHT - _BOTTOM, x.stop
    for value in y.ticks():
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{tick_text(value)}</text>'
        )
    for value in x.ticks():
        # Steps are whole numbers.
        if value != round(value):
            continue
        parts.append(
            f'<text class="tick" x="{x.at(value):.1f}" y="{bottom + 17}" text-anchor="middle">'
            f"{tick_text(value)}</text>"
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    middle = (_LEFT + right) / 2
    parts.append(
        f'<text class="label" x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>'
    )
    across = (_TOP + bottom) / 2
    parts.append(
        f'<text class="label" transform="translate(13 {across:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    return parts


def _path(curve: Curve, x: Scale, y: Scale, attributes: str) -> str:
    steps = []
    pen = "M"
    for step, value in zip(curve.x, curve.y, strict=True):
        if math.isfinite(value):
            steps.append(f"{pen}{x.at(step):.1f} {y.at(value):.1f}")
            pen = "L"
        else:
            pen = "M"
    return f'<path {attributes} d="{" ".join(steps)}"/>'


def _marks(line: Line, x: Scale, y: Scale, thick: float) -> list[str]:
    return [
        f'<circle class="mark c{line.colour}" cx="{x.at(step):.1f}" cy="{y.at(value):.1f}" '
        f'r="{1.5 + thick / 2:g}"><title>{escape(line.label)}, step {step:g}: {value:.6g}</title></circle>'
        for step, value in zip(line.curve.x, line.curve.y, strict=True)
        if math.isfinite(value)
    ]


def tick_text(value: float) -> str:
    """A round number as short as it can be read: 0, 0.25, 1,500, 20k, 1e-05."""
    if abs(value) >= 1e6 or (value != 0.0 and abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    # Multiples of 0.1 are not exact in binary, and 0.30000000000000004 is not a tick.
    return f"{round(value, 6):g}"
