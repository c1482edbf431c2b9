"""What a benchmark leaves: a table on the terminal, and table, data and plot in bench/results/."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Target:
    """A figure that was promised: reached or not, with the number."""

    what: str
    value: float
    bound: float
    at_least: bool = True
    unit: str = "x"

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    @property
    def margin(self) -> float | None:
        """How many times better than wanted; None where nothing at all was wanted or found."""
        if not self.bound or not self.value:
            return None
        return self.value / self.bound if self.at_least else self.bound / self.value

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return (
            f"{'met   ' if self.met else 'MISSED'} {self.what}: "
            f"{self.value:.3g}{self.unit} ({sign} {self.bound:g}{self.unit})"
        )


@dataclass(frozen=True)
class Series:
    """One line of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass
class Report:
    """One benchmark's outcome."""

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    x_label: str = ""
    y_label: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def show(self) -> None:
        table = Table(title=self.title)
        for column in self.columns:
            table.add_column(column, overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        console = Console(width=max(100, Console().width))
        console.print(table)
        for line in (*self.notes, *map(str, self.targets)):
            console.print(line, highlight=False, markup=False)

    def save(self) -> None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(json.dumps(self.to_plain(), indent=2) + "\n")
        (RESULTS / f"{self.name}.md").write_text(self._markdown())
        if self.series:
            self._plot(RESULTS / f"{self.name}.png")
        elif any(target.margin is not None for target in self.targets):
            self._plot_margins(RESULTS / f"{self.name}.png")

    def to_plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "machine": platform.processor() or platform.machine(),
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "targets": [
                {"what": target.what, "value": target.value, "bound": target.bound, "met": target.met}
                for target in self.targets
            ],
            "notes": self.notes,
            **self.data,
        }

    def _markdown(self) -> str:
        lines = [
            f"# {self.title}",
            "",
            "| " + " | ".join(self.columns) + " |",
            "|" + " --- |" * len(self.columns),
        ]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes), *(f"- {target}" for target in self.targets), ""]
        return "\n".join(lines)

    def _plot_margins(self, path: Path) -> None:
        """How far each figure is from what was wanted: 1 is just reached, more is better."""
        pyplot = _pyplot()
        shown = [(target.what, target.margin) for target in self.targets if target.margin is not None]
        figure, axes = pyplot.subplots(figsize=(9, 1 + 0.35 * len(shown)))
        axes.barh([what for what, _ in shown], [margin for _, margin in shown])
        axes.axvline(1.0, color="black", linewidth=1)
        if max(margin for _, margin in shown) > 10:
            axes.set_xscale("log")
        axes.set_xlabel("times as good as wanted")
        axes.set_title(self.title)
        axes.invert_yaxis()
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)

    def _plot(self, path: Path) -> None:
        pyplot = _pyplot()
        figure, axes = pyplot.subplots(figsize=(9, 5.5))
        for series in self.series:
            axes.plot(series.x, series.y, marker="o", label=series.label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        axes.set_title(self.title)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def main(run: Callable[[], Report]) -> None:
    """A benchmark module as a command: prints its table, or JSON with --json; --save writes bench/results/
    too."""
    parser = argparse.ArgumentParser(description=run.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", action="store_true", help="write table, data and plot to bench/results/")
    options = parser.parse_args()
    report = run()
    if options.json:
        print(json.dumps(report.to_plain(), indent=2))
    else:
        report.show()
    if options.save:
        report.save()
