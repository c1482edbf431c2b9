"""`paceline monitor`: watch a run in the terminal. Reads its journal alone; imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import OptionalRun, echo

if TYPE_CHECKING:
    from paceline.monitor.run_overview import RunOverview

_LINE_SECONDS = 10.0  # between two lines where there is no terminal


def monitor(
    run: OptionalRun = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once, also of a finished run.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05)] = 0.5,
) -> None:
    """Watch a run: workers, steps, loss, throughput, share of communication, events. Ends with the run.

    Without a terminal it prints what happens as lines. Ctrl-C ends it; the run does not notice.

    Example: paceline monitor runs/20250301-120000-train
    """
    from rich.console import Console

    from paceline.cli.run_choice import opened
    from paceline.core.clock import MonotonicClock
    from paceline.monitor.journal_follower import JournalFollower
    from paceline.monitor.live_view import live_view
    from paceline.monitor.run_overview import RunOverview
    from paceline.train.state.run_listing import is_running

    folder = opened(run)
    overview = RunOverview(folder.recorded())
    follower = JournalFollower(folder.journal_file)
    console, clock = Console(), MonotonicClock()
    # Asked before the journal is read: what a process wrote before it ended is then read.
    running = is_running(folder.path)
    follower.read_into(overview.read)
    if once or not running:
        console.print(live_view(overview, folder.path.name, running=running))
    elif console.is_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(live_view(overview, folder.path.name, running=running), refresh=True)
                if not running:
                    return
                clock.sleep(interval)
                running = is_running(folder.path)
                follower.read_into(overview.read)
    else:
        shown, next_line = 0, 0.0
        while True:
            shown = _print_events(overview, shown)
            if clock.now() >= next_line or not running:
                next_line = clock.now() + _LINE_SECONDS
                _print_line(overview, folder.path, running)
            if not running:
                return
            clock.sleep(interval)
            running = is_running(folder.path)
            follower.read_into(overview.read)


def _print_events(overview: RunOverview, shown: int) -> int:
    from paceline.monitor.live_view import event_text

    for event in overview.happened[shown:]:
        if event.kind != "checkpoint":  # the line of figures has the newest
            echo(event_text(event))
    return len(overview.happened)


def _print_line(overview: RunOverview, path: Path, running: bool) -> None:
    from paceline.monitor.live_view import status_line

    echo(f"{path.name}: {status_line(overview, running=running)}")
