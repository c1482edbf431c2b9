"""Curves of runs as a picture: PNG, SVG or PDF through matplotlib, or an HTML report without it.

The suffix of the path decides. matplotlib is imported only when it is needed, and never shows a window.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import UnavailableError, UsageError
from paceline.monitor import curves
from paceline.monitor.report import write_report
from paceline.train.history import History, writing

_PICTURES = (".png", ".svg", ".pdf")
_PAGES = (".html", ".htm")


def draw(
    histories: Sequence[History], path: str | os.PathLike[str], titles: Sequence[str] | None = None
) -> Path:
    """Draw the curves of one or more runs; `titles` names them."""
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix in _PAGES:
        return write_report(target, histories, titles)
    if suffix not in _PICTURES:
        raise UsageError(
            f"{target}: the suffix {target.suffix!r} is not one of {', '.join((*_PICTURES, *_PAGES))}",
            remedy="name the file after its format",
        )
    if not histories:
        raise UsageError("a plot needs at least one history", remedy="give what Trainer.fit returned")
    names = curves.names_of(histories, titles)
    metrics = [
        metric
        for metric in curves.metric_names(histories)
        if any(curves.validation_metric(history, metric) for history in histories)
    ]
    figure = _figure(1 + len(metrics))
    axes = figure.subplots(1, 1 + len(metrics), squeeze=False)[0]
    for index, (history, name) in enumerate(zip(histories, names, strict=True)):
        # Runs with equal bits lie on each other: the first are wider, so that all can be seen.
        width = 1.4 + 1.6 * (len(histories) - 1 - index)
        raw = curves.step_losses(history)
        smoothed = curves.smooth(raw)
        if smoothed is not raw:
            thin = curves.thin(raw)
            axes[0].plot(thin.x, thin.y, color=f"C{index}", alpha=0.25, linewidth=0.8)
        axes[0].plot(smoothed.x, smoothed.y, color=f"C{index}", linewidth=width, label=name)
        for axis, metric in zip(axes[1:], metrics, strict=True):
            curve = curves.validation_metric(history, metric)
            axis.plot(curve.x, curve.y, color=f"C{index}", linewidth=width, marker="o", label=name)
    for axis, title in zip(
        axes, ["training loss", *(f"validation {metric}" for metric in metrics)], strict=True
    ):
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(True, alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    with writing("plot", target):
        figure.savefig(target, dpi=130)
    return target


def _figure(columns: int) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnavailableError(
            "pictures are drawn with matplotlib, which is not installed",
            remedy="pip install 'paceline[plot]', or give a path that ends in .html",
        ) from error
    # Without pyplot: nothing global is changed and nothing has to be closed.
    return Figure(figsize=(5.2 * columns, 3.8), layout="constrained")
