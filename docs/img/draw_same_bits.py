"""Draws same-bits.svg from two real runs of examples/demo_train.py: python docs/img/draw_same_bits.py"""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "examples"))

import demo_train  # noqa: E402
from paceline import History  # noqa: E402

INK, GREY, WIDE, THIN = "#1f2933", "#66717f", "#9dbdf2", "#1d3f8f"
LEFT, RIGHT, TOP, BOTTOM = 70.0, 920.0, 96.0, 300.0
FONT = 'font-family="Helvetica, Arial, sans-serif"'


def text(x: float, y: float, words: str, size: int = 14, style: str = f'fill="{INK}"') -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" {FONT} {style}>{words}</text>'


def curve(run: History, colour: str, width: float) -> str:
    """Loss of every step, on a logarithmic axis from 0.003 to 3."""
    low, high = math.log(0.003), math.log(3.0)
    points = " ".join(
        f"{LEFT + (RIGHT - LEFT) * (record.step - 1) / (len(run.steps) - 1):.1f},"
        f"{BOTTOM - (BOTTOM - TOP) * (math.log(record.loss) - low) / (high - low):.1f}"
        for record in run.steps
    )
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" '
        'stroke-linejoin="round"/>'
    )


def picture(four: History, one: History) -> str:
    assert four.state_hash == one.state_hash
    low, high = math.log(0.003), math.log(3.0)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 416" width="960" height="416" role="img" '
        'aria-label="The same run on 4 workers and on 1">',
        "<title>The same run on 4 workers and on 1</title>",
        "<desc>Two curves of the training loss lie on each other, and the hashes of the weights are "
        "equal.</desc>",
        '<rect x="0.5" y="0.5" width="959" height="415" rx="10" fill="#ffffff" stroke="#d5dbe3"/>',
        text(
            480, 36, "One run on 4 workers and on 1",
            18, f'fill="{INK}" text-anchor="middle" font-weight="bold"',
        ),
        text(
            480, 60, "a conv net with BatchNorm and dropout on handwritten digits, loss of every step",
            14, f'fill="{GREY}" text-anchor="middle"',
        ),
    ]  # fmt: skip
    for loss in (0.01, 0.1, 1.0):
        y = BOTTOM - (BOTTOM - TOP) * (math.log(loss) - low) / (high - low)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{RIGHT}" y2="{y:.1f}" stroke="#e3e8ee"/>')
        parts.append(text(LEFT - 10, y + 5, f"{loss:g}", 13, f'fill="{GREY}" text-anchor="end"'))
    parts += [curve(four, WIDE, 8), curve(one, THIN, 1.8)]
    mono = 'font-family="Menlo, Consolas, monospace"'
    for y, colour, width, run in ((340, WIDE, 8, four), (366, THIN, 1.8, one)):
        name = f"{run.workers} worker{'s' if run.workers > 1 else ''}"
        parts.append(
            f'<line x1="{LEFT}" y1="{y - 5}" x2="{LEFT + 44}" y2="{y - 5}" stroke="{colour}" '
            f'stroke-width="{width}"/>'
        )
        parts.append(text(LEFT + 58, y, name))
        parts.append(
            f'<text x="{LEFT + 150:.0f}" y="{y}" font-size="14" {mono} fill="{INK}">{run.state_hash}</text>'
        )
    accuracy = one.evaluations[-1].metrics["accuracy"]
    parts.append(
        text(
            LEFT + 58, 394,
            f"SHA-256 over all weights after {len(one.steps)} steps; validation accuracy {accuracy:.1%}",
            13, f'fill="{GREY}"',
        )
    )  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    target = HERE / "same-bits.svg"
    data = demo_train.digits()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        four, one = (demo_train.train(workers, 4, 8, data) for workers in (4, 1))
        target.write_text(picture(four, one), encoding="utf-8")
        os.chdir(HERE)


if __name__ == "__main__":
    main()
