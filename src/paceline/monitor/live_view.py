"""Draw a run's overview for a terminal: progress, figures, workers and the newest events, as one rich
renderable, and as plain lines where there is no terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.untrusted import printable
from paceline.core.wording import counted
from paceline.monitor.number_format import duration, metrics_text, number, rate
from paceline.monitor.run_overview import RunOverview
from paceline.monitor.timeline import TimelineEvent

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_EVENTS: Final = 8
_WORKERS: Final = 32
_CURVE: Final = 48
_COLOURS: Final = {
    "training": "cyan",
    "starting": "yellow",
    "finished": "green",
    "stopped": "yellow",
    "failed": "red",
    "interrupted": "red",
    "joined": "green",
    "repaired": "green",
    "verdict": "red",
}


def state_of(overview: RunOverview, *, running: bool) -> str:
    """Return the run's state in one word; `running`: a process of it lives. A journal without an end, and no
    process: it was interrupted."""
    return overview.phase if overview.is_over or running else "interrupted"


def live_view(overview: RunOverview, name: str, *, running: bool) -> RenderableType:
    """Return all of it, as wide as the console that prints it."""
    parts: list[RenderableType] = [_headline(overview, running), _figures(overview)]
    if len(overview.losses) > 1:
        parts.append(Text.assemble(("loss  ", "bold"), (sparkline(overview.losses, _CURVE), "cyan")))
    if overview.workers:
        parts.append(_workers(overview, running))
    # Checkpoints, which come all the time, are among the figures.
    told = [event for event in overview.happened if event.kind != "checkpoint"]
    parts += [_event_line(event) for event in told[-_EVENTS:]]
    if overview.is_over and overview.state_hash:
        parts.append(Text.assemble(("state ", "bold"), printable(overview.state_hash)))
    return Panel(Group(*parts), title=Text(printable(name), style="bold"), title_align="left")


def status_line(overview: RunOverview, *, running: bool) -> str:
    """Return one line: where the run is, and its figures."""
    total = overview.total_steps
    steps = f"step {overview.step:,}" + ("" if total is None else f"/{total:,}")
    parts = [state_of(overview, running=running), f"epoch {overview.epoch}", steps]
    parts += [f"{title} {text}" for title, text in _named_figures(overview) if text]
    return ", ".join(parts)


def event_text(event: TimelineEvent) -> str:
    """Return one line about an event: the seconds since the first worker was ready, and what happened."""
    return f"{event.time:>8.2f} s  {_one_line(event.text)}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the curve of the finite values in at most `width` characters, each the mean of its stretch."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [index * len(finite) // count for index in range(count + 1)]
    means = [math.fsum(finite[first:last]) / (last - first) for first, last in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_BLOCKS[min(len(_BLOCKS) - 1, int((mean - low) / span * len(_BLOCKS)))] for mean in means)


def _headline(overview: RunOverview, running: bool) -> RenderableType:
    state = state_of(overview, running=running)
    total = overview.total_steps
    text = Text.assemble((state, f"bold {_COLOURS.get(state, '')}"), f"  epoch {overview.epoch}")
    text.append(f"  step {overview.step:,}" + ("" if total is None else f"/{total:,}"))
    text.append(f"  {duration(overview.seconds)}", style="dim")
    if overview.reason and overview.reason != state:
        text.append(f"  {_one_line(overview.reason)}", style=_COLOURS.get(state, ""))
    if total is None or not total:
        return text
    row = Table.grid(padding=(0, 2))
    row.add_row(text, ProgressBar(total=total, completed=min(overview.step, total), width=24))
    return row


def _named_figures(overview: RunOverview) -> list[tuple[str, str]]:
    share = overview.communication_share
    repairs = overview.repair_seconds
    slowest = f" ({max(repairs):.3f} s at most)" if repairs else ""
    return [
        ("loss", number(overview.loss)),
        ("samples/s", rate(overview.samples_per_second)),
        ("communication", "" if share is None else f"{share:.0%}"),
        ("learning rate", "" if math.isnan(overview.learning_rate) else f"{overview.learning_rate:.3g}"),
        ("validation", metrics_text(overview.validation)),
        ("lost workers", str(overview.failures) if overview.failures else ""),
        ("repairs", f"{len(repairs)}{slowest}" if repairs else ""),
        ("checkpoint", "" if overview.version is None else str(overview.version)),
    ]


def _figures(overview: RunOverview) -> Text:
    text = Text()
    for title, shown in _named_figures(overview):
        if shown:
            text.append(f"{title} ", style="bold")
            text.append(f"{printable(shown)}  ")
    text.rstrip()
    return text


def _workers(overview: RunOverview, running: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("rank", "host", "pid", "doing", "shards", "remark"):
        table.add_column(title, justify="right" if title in ("rank", "pid") else "left", no_wrap=True)
    workers = overview.workers
    for worker in workers[:_WORKERS]:
        again = f"process {worker.processes} of this rank" if worker.processes > 1 else ""
        doing = worker.condition if running or worker.condition in ("failed", "left", "ended") else "gone"
        table.add_row(
            str(worker.rank),
            Text(printable(worker.host)),
            str(worker.pid),
            Text(doing, style=_COLOURS.get(doing, "")),
            ",".join(map(str, worker.shards)),
            Text(_one_line(worker.remark) or again, overflow="ellipsis"),
        )
    if len(workers) > _WORKERS:
        table.add_row("", "", "", f"and {counted(len(workers) - _WORKERS, 'more worker')}", "", "")
    return table


def _event_line(event: TimelineEvent) -> Text:
    return Text(event_text(event), style=_COLOURS.get(event.kind, ""), no_wrap=True, overflow="ellipsis")


def _one_line(text: str) -> str:
    return " ".join(printable(text).split())
