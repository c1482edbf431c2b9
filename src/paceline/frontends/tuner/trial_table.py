"""Trials as a table and as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import UnavailableError, UsageError
from paceline.core.untrusted import printable
from paceline.frontends.tuner.trial_record import TrialRecord, best_of
from paceline.monitor.number_format import number
from paceline.train.history import writing

_PICTURES = (".png", ".svg", ".pdf")


def value_text(value: object) -> str:
    """Return a parameter or a value as a cell shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return printable(str(getattr(value, "__qualname__", value)))


def params_text(params: Mapping[str, Any]) -> str:
    """Return parameters in one line: "lr=0.01 layers=2"."""
    return " ".join(f"{name}={value_text(value)}" for name, value in params.items())


def table(trials: Sequence[TrialRecord], mode: str, metric: str | None, width: int = 160) -> str:
    """Return the trials as text, the best one marked."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    best = best_of(list(trials), mode)
    names = list(dict.fromkeys(name for trial in trials for name in trial.params))
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("trial", "state", metric or "value", *names, "seconds", "remark"):
        shown.add_column(Text(title), justify="left" if title in ("state", "remark") else "right")
    for trial in trials:
        last = trial.error.strip().splitlines()[-1] if trial.error else ""
        remark = "best" if best is not None and trial.number == best.number else last
        value = "-" if trial.value is None else number(trial.value)
        cells = [value_text(trial.params[name]) if name in trial.params else "-" for name in names]
        seconds = "-" if trial.seconds is None else f"{trial.seconds:.2f}"
        row = [str(trial.number), trial.state, value, *cells, seconds]
        shown.add_row(*map(Text, row), Text(printable(remark)))
    output = io.StringIO()
    Console(file=output, width=width).print(shown)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def plot(trials: Sequence[TrialRecord], mode: str, metric: str | None, path: Path) -> Path:
    """Draw the value of each trial and the best so far, and beside it the reports of each trial."""
    if path.suffix.lower() not in _PICTURES:
        raise UsageError(
            f"{path}: the suffix {path.suffix!r} is not one of {', '.join(_PICTURES)}",
            remedy="name the file after its format",
        )
    done = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
    if not done:
        raise UsageError("no trial has a value to draw", remedy="plot after tune() has returned")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(
            "pictures are drawn with matplotlib, which is not installed",
            remedy="pip install 'paceline[plot]'",
        ) from error
    reported = [trial for trial in trials if len(trial.reports) > 1]
    columns = 2 if reported else 1
    figure = Figure(figsize=(5.2 * columns, 3.8), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    better = max if mode == "max" else min
    numbers = [trial.number for trial in done]
    values = [float(trial.value or 0.0) for trial in done]
    best = [better(values[: place + 1]) for place in range(len(values))]
    axes[0].scatter(numbers, values, s=14, color="C0", label="trial")
    axes[0].step(numbers, best, where="post", color="C1", label="best so far")
    axes[0].set_xlabel("trial")
    axes[0].set_ylabel(metric or "value")
    axes[0].legend()
    if reported:
        for trial in reported:
            faint = 0.3 if trial.state == "pruned" else 0.9
            axes[1].plot(list(trial.reports), list(trial.reports.values()), linewidth=1, alpha=faint)
        axes[1].set_xlabel("step")
        axes[1].set_ylabel("reported")
    for axis in axes:
        axis.grid(True, alpha=0.3)
    with writing("plot", path):
        figure.savefig(path, dpi=130)
    return path
