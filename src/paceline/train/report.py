"""Several runs on one page: a single HTML file with curves, figures, hashes and every epoch's metrics.

The file needs no network, script or font: charts are inline SVG, colours follow the reader's light or dark
theme, and it prints. Must not know where the histories came from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from paceline.core.errors import PlatformError, UsageError
from paceline.train import curves
from paceline.train.history import History
from paceline.train.progress import duration, number, rate
from paceline.train.report_style import COLOURS, STYLE
from paceline.train.svg_chart import Line, line_chart
from paceline.train.timeline_figure import Journal, timeline_figures

# Pixels of a chart across the page and of one of two side by side.
_WIDE, _HALF = 1040, 500


def write_report(
    path: str | os.PathLike[str],
    histories: Sequence[History],
    titles: Sequence[str] | None = None,
    *,
    heading: str = "Training report",
    notes: Sequence[str] = (),
    journals: Sequence[Journal | None] = (),
) -> Path:
    """Write `path` (.html) about one or more runs; `titles` names them, `notes` are sentences at the top.

    `journals`, one per history or none at all, add the workers' timelines: a run's folder, the file, or its
    events; None for a run without one.
    """
    if not histories:
        raise UsageError("a report needs at least one history", remedy="give what Trainer.fit returned")
    if titles is not None and len(titles) != len(histories):
        raise UsageError(
            f"{len(titles)} titles were given for {len(histories)} histories",
            remedy="give one title per history, or none at all",
        )
    if journals and len(journals) != len(histories):
        raise UsageError(
            f"{len(journals)} journals were given for {len(histories)} histories",
            remedy="give one journal per history (None where there is none), or none at all",
        )
    names = curves.names_of(histories, titles)
    workers = timeline_figures(journals, names)
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_page(histories, names, heading, notes, workers), encoding="utf-8")
    except OSError as error:
        raise PlatformError(
            f"the report cannot be written to {target}: {error.strerror}",
            remedy="check that its folder may be written to and that the disk has space",
        ) from error
    return target


def _page(
    histories: Sequence[History],
    names: Sequence[str],
    heading: str,
    notes: Sequence[str],
    workers: Sequence[str],
) -> str:
    sections = [
        f"<h1>{escape(heading)}</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        _verdict(histories, names),
        '<div class="cards">',
        *(_card(index, *run) for index, run in enumerate(zip(histories, names, strict=True))),
        "</div>",
        *_charts(histories, names, workers),
        _runs(histories, names),
        _epochs(histories, names),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def _verdict(histories: Sequence[History], names: Sequence[str]) -> str:
    """Whether the runs ended with the same bits, and from which step on they differ if not."""
    if len(histories) < 2:
        return ""
    first = histories[0]
    odd = [
        name for history, name in zip(histories, names, strict=True) if history.state_hash != first.state_hash
    ]
    if not odd:
        equal = _equal_steps(histories)
        all_of = "Both" if len(histories) == 2 else f"All {len(histories)}"
        return (
            '<div class="verdict same"><strong>Same bits.</strong> '
            f"{all_of} runs ended with the state <code>{escape(first.state_hash)}</code>"
            f"{equal}</div>"
        )
    apart = [
        f"{escape(name)} {_first_difference(first, history)}"
        for history, name in zip(histories, names, strict=True)
        if history.state_hash != first.state_hash
    ]
    return (
        f'<div class="verdict differ"><strong>Different bits.</strong> Compared with {escape(names[0])}: '
        f"{'; '.join(apart)}.</div>"
    )


def _equal_steps(histories: Sequence[History]) -> str:
    losses = [{record.step: record.loss for record in history.steps} for history in histories]
    common = set.intersection(*(set(one) for one in losses))
    if not common:
        return "."
    equal = sum(len({_bits(one[step]) for one in losses}) == 1 for step in common)
    if equal == len(common):
        return f"; the losses of all {equal:,} steps they share are equal to the last bit."
    return f"; the losses of {equal:,} of {len(common):,} steps are equal to the last bit."


def _first_difference(reference: History, other: History) -> str:
    theirs = {record.step: record.loss for record in other.steps}
    for record in reference.steps:
        if record.step in theirs and _bits(record.loss) != _bits(theirs[record.step]):
            return f"has another loss from step {record.step:,} on"
    return "has the same losses and another state"


def _bits(value: float) -> str:
    return value.hex()


def _card(index: int, history: History, name: str) -> str:
    figures = [
        ("final loss", number(history.final_loss)),
        ("best accuracy", _or_dash(history.best_accuracy, "{:.2%}")),
        ("samples/s", rate(history.samples_per_second)),
        ("time", duration(history.total_time)),
    ]
    cells = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in figures)
    stopped = "" if history.stopped is None else f'<p class="stopped">stopped: {escape(history.stopped)}</p>'
    facts = [
        _count(history.workers, "worker"),
        _count(history.shards, "shard"),
        _count(_steps(history), "step"),
    ]
    return (
        f'<section class="card"><h2><span class="dot c{index % COLOURS}"></span>{escape(name)}</h2>'
        f'<p class="sub">{", ".join(facts)}</p><dl>{cells}</dl>{stopped}'
        f'<p class="sub">state, SHA-256</p><code>{escape(history.state_hash)}</code></section>'
    )


def _charts(histories: Sequence[History], names: Sequence[str], workers: Sequence[str]) -> list[str]:
    runs = list(zip(histories, names, range(len(names)), strict=True))
    by_step = []
    for history, name, index in runs:
        raw = curves.step_losses(history)
        smoothed = curves.smooth(raw)
        faint = None if smoothed is raw else curves.thin(raw)
        by_step.append(Line(name, index % COLOURS, curves.thin(smoothed), faint))
    smooth = any(line.faint is not None for line in by_step)
    charts = [
        _figure(
            "Training loss",
            line_chart(by_step, x_label="step", y_label="loss", width=_WIDE),
            names,
            "Moving average; the faint line behind it is the loss of every step." if smooth else "",
        ),
        *workers,
    ]
    for metric in curves.metric_names(histories):
        lines = [
            Line(name, index % COLOURS, curves.validation_metric(history, metric), marks=True)
            for history, name, index in runs
        ]
        where = "Validation"
        if not any(line.curve for line in lines):
            where = "Training"
            lines = [
                Line(name, index % COLOURS, curves.training_metric(history, metric), marks=True)
                for history, name, index in runs
            ]
        # The training loss has its own chart already.
        if (metric == "loss" and where == "Training") or not any(line.curve for line in lines):
            continue
        charts.append(
            _figure(
                f"{where} {metric}",
                line_chart(lines, x_label="step", y_label=metric, width=_HALF),
                names,
                "",
            )
        )
    return ['<div class="charts">', *charts, "</div>"]


def _figure(title: str, chart: str, names: Sequence[str], caption: str) -> str:
    legend = "".join(
        f'<span class="key"><span class="dot c{index % COLOURS}"></span>{escape(name)}</span>'
        for index, name in enumerate(names)
    )
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h2>{escape(title)}</h2><div class='legend'>{legend}</div>{chart}{below}</figure>"


def _runs(histories: Sequence[History], names: Sequence[str]) -> str:
    head = (
        "run", "workers", "shards", "steps", "samples", "time", "samples/s", "final loss",
        "best accuracy", "best epoch", "ended", "state",
    )  # fmt: skip
    rows = []
    for index, (history, name) in enumerate(zip(histories, names, strict=True)):
        cells = [
            str(history.workers),
            str(history.shards),
            f"{_steps(history):,}",
            f"{sum(record.samples for record in history.steps):,}",
            duration(history.total_time),
            rate(history.samples_per_second),
            number(history.final_loss),
            _or_dash(history.best_accuracy, "{:.4f}"),
            _or_dash(None if history.best_epoch is None else history.best_epoch + 1, "{}"),
            escape(history.stopped or "at its end"),
            f'<code title="{escape(history.state_hash)}">{escape(history.state_hash[:12])}</code>',
        ]
        first = f'<th scope="row"><span class="dot c{index % COLOURS}"></span>{escape(name)}</th>'
        rows.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return _table("Runs", "".join(f"<th>{title}</th>" for title in head), rows)


def _epochs(histories: Sequence[History], names: Sequence[str]) -> str:
    """One row per epoch, one group of columns per run."""
    groups = [_epoch_columns(history) for history in histories]
    top = "".join(
        f'<th colspan="{len(columns)}" class="group"><span class="dot c{index % COLOURS}"></span>'
        f"{escape(name)}</th>"
        for index, (columns, name) in enumerate(zip(groups, names, strict=True))
        if columns
    )
    second = "".join(f"<th>{escape(title)}</th>" for columns in groups for title in columns)
    epochs = sorted({epoch for columns in groups for column in columns.values() for epoch in column})
    if not epochs:
        return ""
    rows = []
    for epoch in epochs:
        cells = [_or_dash(column.get(epoch), "{}") for columns in groups for column in columns.values()]
        rows.append(
            f'<tr><th scope="row">{epoch + 1}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        )
    return _table("Epochs", f'<th rowspan="2">epoch</th>{top}</tr><tr>{second}', rows)


def _epoch_columns(history: History) -> dict[str, dict[int, str]]:
    columns: dict[str, dict[int, str]] = {}
    last = {ev.epoch: ev.metrics for ev in history.evaluations}
    for record in history.epochs:
        shown = {"loss": number(record.loss)}
        shown |= {name: number(value) for name, value in sorted(record.metrics.items())}
        validation = record.validation or last.get(record.epoch, {})
        names = sorted(validation, key=lambda name: (name != "loss", name))
        shown |= {f"val. {name}": number(validation[name]) for name in names}
        shown["time"] = duration(record.seconds)
        for title, text in shown.items():
            columns.setdefault(title, {})[record.epoch] = text
    return columns


def _table(title: str, head: str, rows: Sequence[str]) -> str:
    return (
        f'<section><h2>{title}</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _steps(history: History) -> int:
    return history.steps[-1].step if history.steps else 0


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _or_dash(value: float | str | None, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return escape(form.format(value))
