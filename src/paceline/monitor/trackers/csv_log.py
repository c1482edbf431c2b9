"""`paceline.CsvLog`: what a run measures as a table, in a csv file."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO, final

from paceline.core import atomic_file
from paceline.monitor.trackers.measurements import TRAIN, TrackedRow
from paceline.monitor.trackers.tracker import OpenBackend, Tracker
from paceline.train.callbacks import RunInfo, SavedCheckpoint
from paceline.train.history import History

_FILE = "metrics.csv"
_FIRST = ("time", "step")


@final
class CsvLog(Tracker):
    """Writes a line per row to `path` (default: `metrics.csv` in the run's folder), every step unless `every`
    says otherwise. Numbers of training are named as they are (`loss`), others with their group
    (`validation/loss`); a number that first appears later adds a column.

    A run that resumes continues the file after the checkpoint's step.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, every: int | None = 1) -> None:
        super().__init__(every=every)
        self.path = None if path is None else Path(path)

    def _plan(self, run: RunInfo) -> OpenBackend:
        path = self.path or Path(run.run_dir or "runs") / _FILE
        return lambda: _CsvTable(path, run.first_step)


@final
class _CsvTable:
    """The open file, and its columns."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._path, self._first_step = path, first_step
        self._columns: list[str] = list(_FIRST)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _read(path) if first_step else []
        # Rows of the steps that are done again now are dropped.
        kept = [row for row in kept if row.get("step", "").isdigit() and int(row["step"]) <= first_step]
        if kept:
            self._columns = list(kept[0])
        self._file = self._rewritten(kept)

    def write(self, row: TrackedRow) -> None:
        prefix = f"{TRAIN}/"
        named = {name.removeprefix(prefix): repr(float(value)) for name, value in row.values.items()}
        line = {"time": f"{row.time:.3f}", "step": str(row.step), **named}
        if row.step <= self._first_step:
            self._forget(line)
        new = [name for name in line if name not in self._columns]
        if new:
            self._file.close()
            self._columns += new
            self._file = self._rewritten(_read(self._path))
        self._file.write(_text([line], self._columns))

    def _forget(self, line: Mapping[str, str]) -> None:
        """Drop the row that an earlier start has written of the same: its evaluation followed the checkpoint
        that this start has begun from, and is done again."""
        self._file.close()
        self._file = self._rewritten([row for row in _read(self._path) if _what(row) != _what(line)])

    def save(self, saved: SavedCheckpoint) -> None:
        """Do nothing: a table keeps no files."""

    def flush(self) -> None:
        self._file.flush()

    def end(self, history: History | None) -> None:
        self._file.close()

    def _rewritten(self, rows: list[dict[str, str]]) -> TextIO:
        """Write the whole file anew, in one step, and return it open at its end."""
        text = _text([dict(zip(self._columns, self._columns, strict=True)), *rows], self._columns)
        atomic_file.replace(self._path, [text.encode()], durable=False)
        return self._path.open("a", encoding="utf-8", newline="")


def _what(row: Mapping[str, str]) -> tuple[str, frozenset[str]]:
    """Return the step of a row and the names of its numbers."""
    return row["step"], frozenset(name for name, value in row.items() if value and name != "time")


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        # A last line that a killed process left unfinished lacks columns.
        return [row for row in csv.DictReader(file) if None not in row.values()]


def _text(rows: list[dict[str, str]] | list[Mapping[str, str]], columns: list[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()
