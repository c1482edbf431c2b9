"""Several runs on one page: a single HTML file with curves, figures, hashes and every epoch's metrics.

The file needs no network, script or font: charts are inline SVG, colours follow the reader's light or dark
theme, and it prints.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

from paceline.core import journal
from paceline.core.errors import UsageError
from paceline.core.events import Event
from paceline.core.wording import counted
from paceline.monitor import curves
from paceline.monitor.number_format import duration, number, rate
from paceline.monitor.report_style import COLOURS, STYLE
from paceline.monitor.svg_chart import ChartLine, line_chart
from paceline.monitor.timeline import RunTimeline, timeline
from paceline.monitor.timeline_chart import incarnations, timeline_chart
from paceline.train.history import History, writing

JournalInput: TypeAlias = "str | os.PathLike[str] | Iterable[Event]"
"""A run's folder, its journal's file, or events."""

_LISTED = 24
_TONES = {"joined": "good", "repaired": "good", "failed": "bad", "verdict": "bad"}
_KEYS = (
    ("failed", "a worker fails", '<g class="failed"><path d="M2 2 L10 10 M2 10 L10 2"/></g>'),
    ("repaired", "until it is repaired", '<rect class="repair" x="2" y="0" width="8" height="12"/>'),
    ("joined", "joins", '<polygon class="joined" points="2,1 10,6 2,11"/>'),
    ("left", "leaves", '<polygon class="left" points="2,1 10,6 2,11"/>'),
    ("checkpoint", "checkpoint", '<polygon class="checkpoint" points="6,1 11,6 6,11 1,6"/>'),
    ("supervisor", "supervisor", '<circle class="supervisor" cx="6" cy="6" r="4.5"/>'),
    ("verdict", "verdict", '<text class="verdict-mark" x="6" y="11" text-anchor="middle">!</text>'),
)

# Pixels of a chart across the page and of one of two side by side.
_WIDE, _HALF = 1040, 500


def write_report(
    path: str | os.PathLike[str],
    histories: Sequence[History],
    titles: Sequence[str] | None = None,
    *,
    heading: str = "Training report",
    notes: Sequence[str] = (),
    journals: Sequence[JournalInput | None] = (),
) -> Path:
    """Write `path` (.html) about one or more runs; `titles` names them, `notes` are sentences at the top.

    `journals`, one per history or none at all, add the workers' timelines: a run's folder, the file, or its
    events; None for a run without one.
    """
    if not histories:
        raise UsageError("a report needs at least one history", remedy="give what Trainer.fit returned")
    if titles is not None and len(titles) != len(histories):
        raise UsageError(
            f"{counted(len(titles), 'title', 'was', 'were')} given for {counted(len(histories), 'run')}",
            remedy="give one title per history, or none at all",
        )
    if journals and len(journals) != len(histories):
        raise UsageError(
            f"{counted(len(journals), 'journal', 'was', 'were')} given for {counted(len(histories), 'run')}",
            remedy="give one journal per history (None where there is none), or none at all",
        )
    names = curves.names_of(histories, titles)
    workers = _timeline_figures(journals, names)
    target = Path(path)
    with writing("report", target):
        target.write_text(_page(histories, names, heading, notes, workers), encoding="utf-8")
    return target


def _page(
    histories: Sequence[History],
    names: Sequence[str],
    heading: str,
    notes: Sequence[str],
    workers: Sequence[str],
) -> str:
    labels = [
        f'<span class="dot c{index % COLOURS}"></span>{escape(name)}' for index, name in enumerate(names)
    ]
    sections = [
        f"<h1>{escape(heading)}</h1>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        _bits_comparison(histories, names),
        '<div class="cards">',
        *map(_card, histories, labels),
        "</div>",
        *_charts(histories, names, labels, workers),
        _runs(histories, labels),
        _epochs(histories, labels),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main></body></html>\n"
    )


def _bits_comparison(histories: Sequence[History], names: Sequence[str]) -> str:
    """Tell whether the runs ended with the same bits, and from which step on they differ if not."""
    if len(histories) < 2:
        return ""
    first = histories[0]
    apart = [
        f"{escape(name)} {_first_difference(first, history)}"
        for history, name in zip(histories, names, strict=True)
        if history.state_hash != first.state_hash
    ]
    if apart:
        return (
            f'<div class="verdict differ"><strong>Different bits.</strong> Compared with {escape(names[0])}: '
            f"{'; '.join(apart)}.</div>"
        )
    all_of = "Both" if len(histories) == 2 else f"All {len(histories)}"
    return (
        f'<div class="verdict same"><strong>Same bits.</strong> {all_of} runs ended with the state '
        f"<code>{escape(first.state_hash)}</code>{equal_steps(histories)}</div>"
    )


def equal_steps(histories: Sequence[History]) -> str:
    losses = [{record.step: record.loss for record in history.steps} for history in histories]
    common = set.intersection(*(set(by_step) for by_step in losses))
    if not common:
        return "."
    equal = sum(len({by_step[step].hex() for by_step in losses}) == 1 for step in common)
    if equal == len(common) == 1:
        return "; the losses of the 1 step they share are equal to the last bit."
    if equal == len(common):
        return f"; the losses of all {equal:,} steps they share are equal to the last bit."
    return f"; the losses of {equal:,} of {counted(len(common), 'step')} are equal to the last bit."


def _first_difference(reference: History, other: History) -> str:
    theirs = {record.step: record.loss for record in other.steps}
    for record in reference.steps:
        if record.step in theirs and record.loss.hex() != theirs[record.step].hex():
            return f"has another loss from step {record.step:,} on"
    return "has the same losses and another state"


def _card(history: History, label: str) -> str:
    figures = [
        ("final loss", number(history.final_loss)),
        ("best accuracy", _or_dash(history.best_accuracy, "{:.2%}")),
        ("samples/s", rate(history.samples_per_second)),
        ("time", duration(history.total_time)),
    ]
    cells = "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in figures)
    stopped = "" if history.stopped is None else f'<p class="stopped">stopped: {escape(history.stopped)}</p>'
    counts = {"worker": history.workers, "shard": history.shards, "step": _steps(history)}
    facts = [counted(count, noun) for noun, count in counts.items()]
    return (
        f'<section class="card"><h2>{label}</h2>'
        f'<p class="sub">{", ".join(facts)}</p><dl>{cells}</dl>{stopped}'
        f'<p class="sub">state, SHA-256</p><code>{escape(history.state_hash)}</code></section>'
    )


def _charts(
    histories: Sequence[History], names: Sequence[str], labels: Sequence[str], workers: Sequence[str]
) -> list[str]:
    runs = list(zip(histories, names, range(len(names)), strict=True))
    by_step = []
    for history, name, index in runs:
        raw = curves.step_losses(history)
        smoothed = curves.smooth(raw)
        faint = None if smoothed is raw else curves.thin(raw)
        by_step.append(ChartLine(name, index % COLOURS, curves.thin(smoothed), faint))
    smooth = any(line.faint is not None for line in by_step)
    charts = [
        _figure(
            "Training loss",
            line_chart(by_step, x_label="step", y_label="loss", width=_WIDE),
            labels,
            "Moving average; the faint line behind it is the loss of every step." if smooth else "",
        ),
        *workers,
    ]
    for metric in curves.metric_names(histories):
        for where, pick in (("Validation", curves.validation_metric), ("Training", curves.training_metric)):
            lines = [
                ChartLine(name, index % COLOURS, pick(run, metric), marks=True) for run, name, index in runs
            ]
            # The training loss has its own chart already.
            if any(line.curve for line in lines) and (where, metric) != ("Training", "loss"):
                chart = line_chart(lines, x_label="step", y_label=metric, width=_HALF)
                charts.append(_figure(f"{where} {metric}", chart, labels))
                break
    return ['<div class="charts">', *charts, "</div>"]


def _figure(title: str, chart: str, labels: Sequence[str], caption: str = "") -> str:
    legend = "".join(f'<span class="key">{label}</span>' for label in labels)
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure><h2>{escape(title)}</h2><div class='legend'>{legend}</div>{chart}{below}</figure>"


def _runs(histories: Sequence[History], labels: Sequence[str]) -> str:
    rows = []
    for history, label in zip(histories, labels, strict=True):
        cells = {
            "workers": str(history.workers),
            "shards": str(history.shards),
            "steps": f"{_steps(history):,}",
            "samples": f"{sum(record.samples for record in history.steps):,}",
            "time": duration(history.total_time),
            "samples/s": rate(history.samples_per_second),
            "communication": _or_dash(history.communication_share, "{:.1%}"),
            "data": _or_dash(history.data_share, "{:.1%}"),
            "computing": _or_dash(history.compute_efficiency, "{:.1%}"),
            "final loss": number(history.final_loss),
            "best accuracy": _or_dash(history.best_accuracy, "{:.4f}"),
            "best epoch": _or_dash(history.best_epoch, "{}"),
            "ended": escape(history.stopped or "at its end"),
            "state": f'<code title="{escape(history.state_hash)}">{escape(history.state_hash[:12])}</code>',
        }
        values = "".join(f"<td>{cell}</td>" for cell in cells.values())
        rows.append(f'<tr><th scope="row">{label}</th>{values}</tr>')
    return _table("Runs", "".join(f"<th>{title}</th>" for title in ("run", *cells)), rows)


def _epochs(histories: Sequence[History], labels: Sequence[str]) -> str:
    """Return one row per epoch, one group of columns per run."""
    groups = [_epoch_columns(history) for history in histories]
    top = "".join(
        f'<th colspan="{len(columns)}" class="group">{label}</th>'
        for columns, label in zip(groups, labels, strict=True)
        if columns
    )
    second = "".join(f"<th>{escape(title)}</th>" for columns in groups for title in columns)
    epochs = sorted({epoch for columns in groups for column in columns.values() for epoch in column})
    if not epochs:
        return ""
    rows = []
    for epoch in epochs:
        cells = [_or_dash(column.get(epoch), "{}") for columns in groups for column in columns.values()]
        rows.append(f'<tr><th scope="row">{epoch}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
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


def _or_dash(value: float | str | None, form: str) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return escape(form.format(value))


def _timeline_figures(journals: Sequence[JournalInput | None], names: Sequence[str]) -> list[str]:
    """Return one figure per journal in which a worker started."""
    figures = []
    for given, name in zip(journals, names, strict=False):
        made = RunTimeline() if given is None else timeline(_events(given))
        if made.lifetimes:
            figures.append(_timeline_figure(made, f"Workers of {name}" if len(names) > 1 else "Workers"))
    return figures


def _events(given: JournalInput) -> Iterable[Event]:
    if not isinstance(given, str | os.PathLike):
        return given
    path = Path(given)
    return journal.iterate(path / "journal.jsonl" if path.is_dir() else path)


def _timeline_figure(made: RunTimeline, title: str) -> str:
    keys = [
        f'<span class="key"><span class="dot c{colour}"></span>{text}</span>'
        for colour, text in incarnations(made)
    ]
    kinds = {event.kind for event in made.events}
    keys += [
        f'<span class="key"><svg viewBox="0 0 12 12" aria-hidden="true">{drawing}</svg>{text}</span>'
        for kind, text, drawing in _KEYS
        if kind in kinds
    ]
    return (
        f'<figure class="wide"><h2>{escape(title)}</h2><div class="legend">{"".join(keys)}</div>'
        f"{timeline_chart(made, width=_WIDE)}{_event_list(made)}</figure>"
    )


def _event_list(made: RunTimeline) -> str:
    """List what happened, without checkpoints; of a long list the beginning, and counts of the rest."""
    shown = [event for event in made.events if event.kind not in ("checkpoint", "ended")]
    # A run without incidents needs no list.
    if all(event.kind == "supervisor" for event in shown):
        return ""
    items = [
        f'<li><span class="when">{event.time:.2f} s</span>'
        f'<span class="{_TONES.get(event.kind, "plain")}">{escape(_short(event.text))}</span></li>'
        for event in shown[:_LISTED]
    ]
    if len(shown) > _LISTED:
        rest = Counter(event.kind for event in shown[_LISTED:])
        more = ", ".join(f"{count} {kind}" for kind, count in rest.most_common())
        items.append(f'<li><span class="when">then</span><span>{more}</span></li>')
    return f'<ul class="happened">{"".join(items)}</ul>'


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:157] + "..."
