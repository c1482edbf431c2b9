"""Traces that the workers of a run wrote (`TrainConfig.profile`), joined: time by operator, over all ranks.

Reads the files of torch's profiler (Chrome's trace format) and nothing else. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final

from paceline.core import wording
from paceline.core.errors import UsageError
from paceline.core.wording import counted

_NAME = re.compile(r"rank-(\d+)\.step-(\d+)\.pt\.trace\.json")
_PHASE = "phase: "
# Kinds of events that nest on the thread that they are of, and kinds that run on a device.
_ON_A_THREAD = ("cpu_op", "user_annotation")
_ON_A_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME_WIDTH = 48


def trace_name(rank: int, step: int) -> str:
    """Return the name of the trace of a rank whose first recorded step is `step`; viewers of torch's traces
    find it by its end."""
    return f"rank-{rank}.step-{step}.pt.trace.json"


def phase_label(phase: str) -> str:
    """Return the name under which a phase of the training loop stands in a trace."""
    return f"{_PHASE}{phase}"


def clear_traces(folder: Path) -> None:
    """Delete the traces of an earlier run, which would be joined with those of the next; other files stay."""
    if folder.is_dir():
        for file in _traces(folder):
            file.unlink(missing_ok=True)


@final
@dataclass
class OperatorTotal:
    """Time of one operator, phase or kernel, in milliseconds, over all ranks. `self_ms` is without what it
    called; `by_rank` has that of each rank."""

    name: str
    calls: int = 0
    self_ms: float = 0.0
    total_ms: float = 0.0
    by_rank: dict[int, float] = field(default_factory=lambda: defaultdict(float))


_ORDERS: Mapping[str, Callable[[OperatorTotal], float]] = {
    "self": lambda one: one.self_ms,
    "total": lambda one: one.total_ms,
    "calls": lambda one: one.calls,
}


@final
@dataclass(frozen=True)
class TraceSummary:
    """The traces of one run, by their folder; read when they are asked for."""

    folder: Path

    @property
    def traces(self) -> list[Path]:
        """The files, by rank and step."""
        return _traces(self.folder)

    def totals(self) -> list[OperatorTotal]:
        """Return the operators, those with the most time of their own first."""
        files = self.traces
        if not files:
            raise UsageError(
                f"{self.folder} holds no trace of a worker",
                remedy="profile a run of two steps or more: the first step is not recorded",
            )
        found: dict[str, OperatorTotal] = {}
        for file in files:
            rank = int(_matched(file)[1])
            for name, own, whole in _timed(_events(file)):
                total = found.setdefault(name, OperatorTotal(name))
                total.calls += 1
                total.self_ms += own
                total.total_ms += whole
                total.by_rank[rank] += own
        return sorted(found.values(), key=lambda total: (-total.self_ms, total.name))

    def table(self, rows: int = 20, sort_by: Literal["self", "total", "calls"] = "self") -> str:
        """Return a text table of the first `rows` operators: their time over all ranks, and by rank."""
        totals = self.totals()
        if sort_by not in _ORDERS:
            raise UsageError(f"sort_by={sort_by!r} is no order", remedy=f"use {', '.join(_ORDERS)}")
        ranks = sorted({rank for total in totals for rank in total.by_rank})
        everything = sum(total.self_ms for total in totals) or 1.0
        head = ["operator", "calls", "self ms", "share", "total ms", *(f"rank {rank}" for rank in ranks)]
        lines = [
            [
                total.name if len(total.name) <= _NAME_WIDTH else f"{total.name[: _NAME_WIDTH - 3]}...",
                f"{total.calls:,}",
                f"{total.self_ms:,.3f}",
                f"{total.self_ms / everything:.1%}",
                f"{total.total_ms:,.3f}",
                *(f"{total.by_rank.get(rank, 0.0):,.3f}" for rank in ranks),
            ]
            for total in sorted(totals, key=_ORDERS[sort_by], reverse=True)[:rows]
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        text = [_line(cells, widths) for cells in (head, ["-" * width for width in widths], *lines)]
        of = f"{counted(len(self.traces), 'trace')} of {wording.ranks(ranks)}"
        return "\n".join([*text, f"{of}: {everything:,.3f} ms in all; the columns of ranks are self ms"])


def _line(cells: Iterable[str], widths: Iterable[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()


def _matched(file: Path) -> re.Match[str]:
    found = _NAME.fullmatch(file.name)
    assert found is not None
    return found


def _traces(folder: Path) -> list[Path]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    files = [folder / name for name in names if _NAME.fullmatch(name)]
    return sorted(files, key=lambda file: tuple(map(int, _matched(file).groups())))


def _events(file: Path) -> list[Mapping[str, Any]]:
    try:
        data = json.loads(file.read_text(encoding="utf-8", errors="replace"))
        events = data["traceEvents"]
        return [event for event in events if event.get("ph") == "X" and "dur" in event]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{file} is not a trace of torch's profiler: {error}", remedy="delete it, and profile again"
        ) from error


def _timed(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Return the name, the milliseconds without and those with what was called, of each event."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        kind = event.get("cat")
        if kind in _ON_A_DEVICE:
            milliseconds = float(event["dur"]) / 1e3
            yield str(event["name"]), milliseconds, milliseconds
        elif kind in _ON_A_THREAD:
            threads[event.get("pid"), event.get("tid")].append(event)
    for thread in threads.values():
        yield from _nested(thread)


def _nested(events: list[Mapping[str, Any]]) -> Iterator[tuple[str, float, float]]:
    """Return the same for events of one thread, each of which lies within another one or beside it."""
    # Each open event: its name, end, duration, and the time of what it has called so far.
    stack: list[list[Any]] = []
    for event in sorted(events, key=lambda one: (float(one["ts"]), -float(one["dur"]))):
        start, length = float(event["ts"]), float(event["dur"])
        while stack and stack[-1][1] <= start:
            yield _closed(stack)
        stack.append([str(event["name"]), start + length, length, 0.0])
    while stack:
        yield _closed(stack)


def _closed(stack: list[list[Any]]) -> tuple[str, float, float]:
    name, _, length, called = stack.pop()
    if stack:
        stack[-1][3] += length
    return name, max(0.0, length - called) / 1e3, length / 1e3
