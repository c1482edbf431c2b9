"""`paceline logs`: the workers' log files as one, with the rank in front of each line. Imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.output import OptionalRun, echo
from paceline.core.errors import UsageError
from paceline.core.wording import ranks as ranks_text


def logs(
    run: OptionalRun = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what comes, until the run ends.")
    ] = False,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", "-r", help="Only of this rank; repeat for several.")
    ] = None,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", help="Begin with the last N lines.", min=0)
    ] = None,
) -> None:
    """Print the logs of a run's workers, in the order of their times, with the rank in front of each line.

    Example: paceline logs runs/20250301-120000-train -f
    """
    from paceline.cli.run_choice import opened
    from paceline.core.clock import MonotonicClock
    from paceline.monitor.worker_log_lines import WorkerLogReader
    from paceline.train.state.run_listing import is_running

    folder = opened(run)
    # The last lines of a long log are looked for in its end.
    tail = None if lines is None else 4096 + 4096 * lines
    reader = WorkerLogReader(folder.logs, rank or (), tail_bytes=tail)
    # Asked before the logs are read: what a worker wrote before it ended is then read.
    running = follow and is_running(folder.path)
    if not running:
        _check(WorkerLogReader(folder.logs).ranks(), rank or [], str(folder.path))
    found = reader.read()
    for number, line in found[-lines:] if lines else [] if lines == 0 else found:
        echo(f"rank {number} | {line}")
    clock = MonotonicClock()
    while running:
        clock.sleep(0.2)
        running = is_running(folder.path)
        for number, line in reader.read():
            echo(f"rank {number} | {line}")


def _check(there: list[int], wanted: list[int], path: str) -> None:
    missing = [number for number in wanted if number not in there]
    if not there:
        raise UsageError(
            f"{path} has no logs of workers",
            remedy="its workers have not started; see `paceline monitor` for what the run does",
        )
    if missing:
        raise UsageError(
            f"{path} has no log of {ranks_text(missing, all_named=True)}",
            remedy=f"it has those of {ranks_text(there, all_named=True)}",
        )
