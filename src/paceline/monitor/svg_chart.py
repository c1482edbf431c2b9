"""A line chart as SVG text: axes with round numbers, several lines, nothing to install.

Lines that lie on top of each other stay visible: earlier ones are wider, later ones run inside of them.
Colours are CSS variables of the page (--line-0, --grid, --text), so that a chart follows light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import final

from paceline.monitor.curves import Curve

HEIGHT = 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 42
_TICKS = 5
_WIDEST, _NARROWEST = 6.0, 2.0
# From this ratio of the largest to the smallest value on, equal factors are equal distances.
_LOG_FROM = 200.0


@final
@dataclass(frozen=True)
class ChartLine:
    """One line; `faint` (the unsmoothed curve) is drawn behind it, `marks` puts a dot at every point."""

    label: str
    colour: int
    curve: Curve
    faint: Curve | None = None
    marks: bool = False


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


def line_chart(lines: Sequence[ChartLine], *, x_label: str, y_label: str, width: int) -> str:
    """Draw the lines that have a point, `width` pixels wide."""
    drawn = [line for line in lines if line.curve]
    if not drawn:
        return '<p class="nothing">nothing was recorded</p>'
    x = _x_scale([value for line in drawn for value in line.curve.x], width)
    y = _y_scale(
        [value for line in drawn for curve in (line.curve, line.faint) if curve for value in curve.y]
    )
    parts = _axes(x, y, x_label, y_label)
    for line in drawn:
        if line.faint is not None:
            parts.append(_path(line.faint, x, y, f'class="faint c{line.colour}"'))
    for index, line in enumerate(drawn):
        share = 0.0 if len(drawn) == 1 else 1.0 - index / (len(drawn) - 1)
        thick = _NARROWEST + share * (_WIDEST - _NARROWEST)
        parts.append(_path(line.curve, x, y, f'class="line c{line.colour}" stroke-width="{thick:g}"'))
        if line.marks:
            parts += _marks(line, x, y, thick)
    return svg("lines", parts, width, HEIGHT, f"{y_label} by {x_label}")


def svg(kind: str, parts: Sequence[str], width: int, height: float, label: str) -> str:
    """Return the image of these elements."""
    return (
        f'<svg class="{kind}" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(label)}" '
        'preserveAspectRatio="xMidYMid meet">\n' + "\n".join([*parts, "</svg>"])
    )


def rule(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a straight line, in the style of its kind."""
    return f'<line class="{kind}" x1="{_px(x1)}" x2="{_px(x2)}" y1="{_px(y1)}" y2="{_px(y2)}"/>'


def text(kind: str, x: float, y: float, content: str, anchor: str = "middle") -> str:
    """Return a text (`content` is escaped already), in the style of its kind."""
    return f'<text class="{kind}" x="{_px(x)}" y="{_px(y)}" text-anchor="{anchor}">{content}</text>'


def _px(value: float) -> str:
    return f"{round(value, 1):g}"


def _x_scale(values: Sequence[float], width: int) -> Scale:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1.0, high + 1.0
    # A run is drawn from its beginning, unless it resumed far away from there.
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
    """Return the round number (1, 2 or 5 times a power of ten) nearest to this one."""
    power = 10.0 ** math.floor(math.log10(rough))
    return min((step * power for step in (1.0, 2.0, 5.0, 10.0)), key=lambda step: abs(math.log(step / rough)))


def _axes(x: Scale, y: Scale, x_label: str, y_label: str) -> list[str]:
    parts = []
    bottom, right = HEIGHT - _BOTTOM, x.stop
    for value in y.ticks():
        at = y.at(value)
        parts += [
            rule("grid", _LEFT, at, right, at),
            text("tick", _LEFT - 8, at + 4, tick_text(value), "end"),
        ]
    for value in x.ticks():
        # Steps are whole numbers.
        if value == round(value):
            parts.append(text("tick", x.at(value), bottom + 17, tick_text(value)))
    across = (_TOP + bottom) / 2
    return [
        *parts,
        rule("axis", _LEFT, bottom, right, bottom),
        text("label", (_LEFT + right) / 2, HEIGHT - 6, escape(x_label)),
        f'<text class="label" transform="translate(13 {across:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]


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


def _marks(line: ChartLine, x: Scale, y: Scale, thick: float) -> list[str]:
    return [
        f'<circle class="mark c{line.colour}" cx="{x.at(step):.1f}" cy="{y.at(value):.1f}" '
        f'r="{1.5 + thick / 2:g}"><title>{escape(line.label)}, step {step:g}: {value:.6g}</title></circle>'
        for step, value in zip(line.curve.x, line.curve.y, strict=True)
        if math.isfinite(value)
    ]


def tick_text(value: float) -> str:
    """Format a round number as short as it can be read: 0, 0.25, 1,500, 20k, 1e-05."""
    if abs(value) >= 1e6 or (value != 0.0 and abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    # Multiples of 0.1 are not exact in binary, and 0.30000000000000004 is not a tick.
    return f"{round(value, 6):g}"
