"""`paceline ls` and `paceline gc`: the runs on disk, and deleting those that are not needed. No torch."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from paceline.cli.output import AsJson, echo, echo_json, size_text
from paceline.core.errors import PacelineError, UsageError
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.train.state.run_listing import FoundRun, RunPhase

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_RUNS = "runs"
Below = Annotated[str | None, typer.Argument(help="The folder that holds runs; without one ./runs.")]


def list_runs(folder: Below = None, as_json: AsJson = False) -> None:
    """List the runs below a folder, oldest first: state, steps, loss, size, and when each last did something.

    Example: paceline ls
    """
    runs = _found(folder)
    now = time.time()
    if as_json:
        echo_json([plain(run, now) for run in runs])
    elif not runs:
        echo(f"no runs below {folder or _RUNS}")
    else:
        _print_table(runs, now)


def gc(
    folder: Below = None,
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than", metavar="TIME", help="Without an event for longer than 90s, 30m, 12h, 7d, 2w."
        ),
    ] = "7d",
    keep: Annotated[int, typer.Option("--keep", help="Keep the N that changed last.", min=0)] = 0,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", help="Only finished, stopped, failed, interrupted or not-begun ones; repeatable."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete them; without it they are only shown.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the runs that are not needed any longer, and delete them with --yes. A run in progress, and one
    with a tagged checkpoint, is never deleted. Exit code 1 where one could not be deleted.

    Example: paceline gc --older-than 7d --keep 5 --state failed --yes
    """
    from paceline.train.state.run_listing import remove_runs, runs_to_remove

    seconds, phases = parse_age(older_than), _phases(state)
    now = time.time()
    runs = runs_to_remove(_found(folder), now=now, keep_last=keep, older_than=seconds, phases=phases)
    results = remove_runs(runs) if yes else [(run, None) for run in runs]
    failed = [error for _, error in results if error is not None]
    if as_json:
        echo_json(
            {
                "deleted": yes,
                "runs": [
                    {**plain(run, now), "error": None if error is None else error.message}
                    for run, error in results
                ],
            }
        )
    else:
        _print_removal(results, folder or _RUNS, yes)
    if failed:
        raise typer.Exit(1)


def _found(folder: str | None) -> list[FoundRun]:
    """Return the runs below a folder; a ./runs that was not named and is not there holds none. Folders that
    are closed to this user are named on standard error."""
    from paceline.train.state.run_listing import find_runs

    if folder is None and not os.path.exists(_RUNS):
        return []
    closed: list[Path] = []
    runs = find_runs(folder or _RUNS, closed.append)
    if closed:
        names = ", ".join(sorted(path.name for path in closed))
        echo(f"left out, closed to this user: {names}", err=True)
    return runs


def parse_age(text: str) -> float:
    """Return the seconds of a text such as 90s, 30m, 12h, 7d or 2w."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if match is None:
        raise UsageError(
            f"--older-than {text!r} is not a time", remedy="write it like 90s, 30m, 12h, 7d or 2w"
        )
    return float(match[1]) * _UNITS[match[2]]


def plain(run: FoundRun, now: float) -> dict[str, object]:
    """Return what `--json` prints of a run."""
    return {
        "path": str(run.path),
        "state": run.phase,
        "reason": run.reason,
        "step": run.step,
        "loss": None if math.isnan(run.loss) else run.loss,
        "checkpoints": run.versions,
        "tags": list(run.tags),
        "bytes": run.bytes,
        "started": run.started,
        "changed": run.changed,
        "age": max(0.0, now - run.changed),
    }


def age_text(seconds: float) -> str:
    """Return an age as people say it: 12 s, 5 min, 3 h, 2 d."""
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _phases(names: list[str] | None) -> list[RunPhase] | None:
    from paceline.train.state.run_listing import RunPhase

    if not names:
        return None
    known = {phase.replace(" ", "-"): phase for phase in get_args(RunPhase) if phase != "running"}
    for name in names:
        if name not in known:
            why = "a run in progress is never deleted" if name == "running" else "no state of a run"
            raise UsageError(f"--state {name}: {why}", remedy=f"give one of {', '.join(known)}")
    return [known[name] for name in names]


def _print_table(runs: list[FoundRun], now: float) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from paceline.core.untrusted import printable
    from paceline.monitor.number_format import number

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("run", "state", "steps", "loss", "size", "age", "remark"):
        right = title in ("steps", "loss", "size", "age")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "remark")
    for run in runs:
        tags = f"tagged {', '.join(run.tags)}" if run.tags else ""
        remark = " ".join(printable(run.reason or tags).split())
        loss = "-" if math.isnan(run.loss) else number(run.loss)
        row = [f"{run.step:,}", loss, size_text(run.bytes), age_text(now - run.changed)]
        table.add_row(Text(printable(run.path.name)), run.phase, *row, Text(remark))
    # In a file or a pipe a row is a line, as far as that goes.
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    total = size_text(sum(run.bytes for run in runs))
    echo(f"{counted(len(runs), 'run')}, {total}")


def _print_removal(results: Sequence[tuple[FoundRun, PacelineError | None]], folder: str, done: bool) -> None:
    if not results:
        echo(f"nothing to delete below {folder}")
        return
    for run, error in results:
        size = size_text(run.bytes)
        if error is not None:
            echo(f"kept {run.path}: {error}", err=True)
        else:
            echo(
                f"{'deleted' if done else 'would delete'} {run.path} ({run.phase}, step {run.step:,}, {size})"
            )
    gone = [run for run, error in results if error is None]
    total = size_text(sum(run.bytes for run in gone))
    what = f"{counted(len(gone), 'run')}, {total}"
    echo(f"{what} deleted" if done else f"{what}; nothing is deleted yet: add --yes")
