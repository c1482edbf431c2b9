"""What `paceline queue ls`, `show` and `logs` print. Imports no torch."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any, Final

from paceline.cli.output import echo, echo_json
from paceline.cli.runs import age_text
from paceline.core.clock import MonotonicClock
from paceline.core.errors import PlatformError, UsageError
from paceline.core.untrusted import printable, redact_secrets
from paceline.core.wording import counted
from paceline.frontends.run_queue.queue_client import capacity_of, find_run, remark, steps
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.queued_run import ENDED, QueueContent, QueuedRun

_RECENT_SECONDS: Final = 86400.0
_PAUSE: Final = 0.2
_AT_ONCE: Final = 1 << 20


def plain(run: QueuedRun, capacity: int, now: float) -> dict[str, Any]:
    """Return what `--json` prints of a run; no secrets of its arguments, no values of its variables."""
    request = run.request
    return {
        "id": run.id,
        "name": request.name,
        "state": run.state,
        "reason": remark(run, capacity),
        "priority": request.priority,
        "workers": run.workers,
        "min_workers": request.least,
        "max_workers": request.most,
        "step": steps(run),
        "attempts": run.attempt,
        "exit_code": run.code,
        "added": run.added,
        "since": run.since,
        "age": max(0.0, now - run.since),
        "run_dir": request.run_dir,
        "folder": request.folder,
        "command": _command(run),
        "variables": sorted(request.environment),
    }


def _command(run: QueuedRun) -> list[str]:
    request = run.request
    rest = ("--", *request.arguments) if request.arguments else ()
    return [*redact_secrets([*request.options, *rest])]


def print_table(folder: QueueFolder, every: bool, as_json: bool) -> None:
    """Print the runs, in the order in which they get workers, then those that have ended."""
    content, now = folder.read(), time.time()
    capacity = capacity_of(folder, content)
    runs = [
        run for run in content.runs if every or run.state not in ENDED or now - run.since < _RECENT_SECONDS
    ]
    runs.sort(key=lambda run: (run.state in ENDED, -run.request.priority, run.id))
    used = sum(run.workers for run in content.runs)
    served = folder.is_served
    if as_json:
        rows = [plain(run, capacity, now) for run in runs]
        echo_json({"queue": str(folder.path), "workers": capacity, "served": served, "runs": rows})
        return
    if not runs:
        echo(f"no runs in the queue {folder.path}")
    else:
        _print_rows(runs, capacity, now)
    left = len(content.runs) - len(runs)
    older = f", {counted(left, 'older one')} (--all)" if left else ""
    echo(f"{counted(len(runs), 'run')}{older}; {used} of {counted(capacity, 'worker')} in use")
    if content.has_work and not served:
        echo("no server is running: paceline queue serve", err=True)


def _print_rows(runs: list[QueuedRun], capacity: int, now: float) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("id", "name", "state", "priority", "workers", "step", "since", "remark"):
        right = title in ("id", "priority", "step", "since")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "remark")
    for run in runs:
        now_of = f"{run.workers} of {run.request.size}" if run.workers else run.request.size
        words = " ".join(printable(remark(run, capacity)).split())
        table.add_row(
            str(run.id),
            Text(printable(run.request.name)),
            run.state,
            str(run.request.priority),
            now_of,
            f"{steps(run):,}",
            age_text(now - run.since),
            Text(words),
        )
    # In a file or a pipe a row is a line, as far as that goes.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def print_run(run: QueuedRun, folder: QueueFolder, content: QueueContent, as_json: bool) -> None:
    """Print all that is known of a run."""
    now, capacity = time.time(), capacity_of(folder, content)
    facts = plain(run, capacity, now)
    if as_json:
        notes = [{"time": note.time, "text": note.text} for note in run.notes]
        echo_json({**facts, "log": str(folder.log_of(run.id)), "notes": notes, "output": list(run.tail)})
        return
    size = f"{run.workers} of {run.request.size}" if run.workers else run.request.size
    rows = {
        "state": f"{run.state} for {age_text(now - run.since)}",
        "reason": facts["reason"],
        "priority": str(run.request.priority),
        "workers": size,
        "step": f"{facts['step']:,}",
        "starts": str(run.attempt),
        "command": shlex.join(["paceline", "train", *facts["command"]]),
        "in": run.request.folder,
        "run": run.request.run_dir,
        "output": str(folder.log_of(run.id)),
    }
    echo(run.label)
    for title, text in rows.items():
        if text:
            echo(f"  {title:<9} {text}")
    for note in run.notes:
        echo(f"  {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(note.time))}  {note.text}")
    if run.tail:
        echo("  the last lines of its output:")
        for line in run.tail:
            echo(f"    {line}")


def print_log(folder: QueueFolder, run: QueuedRun, follow: bool, lines: int | None) -> None:
    """Print what a run printed, and what comes until it ends."""
    path = folder.log_of(run.id)
    if not path.exists() and not follow:
        raise UsageError(
            f"{run.label} has printed nothing: it is {run.state}", remedy="follow it with -f, or wait for it"
        )
    # Asked before the file is read: what the run wrote before it ended is then read.
    over = _is_over(folder, run)
    offset = _print_from(path, 0, lines)
    clock = MonotonicClock()
    while follow and not over:
        clock.sleep(_PAUSE)
        over = _is_over(folder, run)
        offset = _print_from(path, offset, None)


def _is_over(folder: QueueFolder, run: QueuedRun) -> bool:
    return find_run(folder.read(), str(run.id)).state in ENDED


def _print_from(path: Path, offset: int, lines: int | None) -> int:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return offset
    except OSError as error:
        raise PlatformError(f"{path} cannot be read: {error.strerror}", remedy="check its disk") from error
    # What follows the last newline may still be written to its end.
    whole, newline, _ = data.rpartition(b"\n")
    if not newline:
        return offset
    # Of a line that was drawn over and over (a progress bar), the last state is what is left to see.
    shown = [line.rpartition("\r")[2] for line in whole.decode("utf-8", "replace").split("\n")]
    for line in shown if lines is None else shown[-lines:] if lines else []:
        echo(line)
    return offset + len(whole) + 1
