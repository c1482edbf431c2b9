"""`paceline queue`: runs that wait for workers, and share them. Imports no torch."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand

from paceline.cli.output import AsJson, echo, echo_json
from paceline.core.errors import UsageError
from paceline.core.wording import counted, listed

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

_ARGUMENTS = "paceline.script_arguments"

Queue = Annotated[
    str | None,
    typer.Option(
        "--queue", metavar="DIR", help="The queue's folder; else PACELINE_QUEUE, else the user's own."
    ),
]
RunNumber = Annotated[str, typer.Argument(help="The number of a run in the queue, or its name.")]
RunNumbers = Annotated[list[str], typer.Argument(help="Numbers of runs in the queue, or their names.")]
NoServer = Annotated[
    bool, typer.Option("--no-server", help="Start no server in the background where none is running.")
]


@app.callback()
def queue_of_runs() -> None:
    """Runs that wait for workers, and share those of this machine or of a cluster.

    Example: paceline queue add train.py --workers 1-4
    """


class AddCommand(TyperCommand):
    """Takes options that it does not know for those of `paceline train`, and the rest for the script's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGUMENTS] = tuple(args[at + 1 :])
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [str(self.options_metavar)]  # the script is in it


@app.command(
    "add",
    cls=AddCommand,
    context_settings={"ignore_unknown_options": True},
    options_metavar="SCRIPT [OPTIONS] [OPTIONS OF paceline train] [-- ARGS]...",
)
def add(
    ctx: typer.Context,
    script: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT...", help="The script, and options of `paceline train`."),
    ],
    priority: Annotated[int, typer.Option(help="Higher ones get workers first; may be negative.")] = 0,
    workers: Annotated[
        str | None,
        typer.Option(metavar="MIN-MAX", help="The fewest and the most workers; without it 1 to all."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="A name for the run; without it the script's.")] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="The run's folder; a run that is in it continues. Else a new one."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="A variable for the run; repeatable."),
    ] = None,
    queue: Queue = None,
    no_server: NoServer = False,
    as_json: AsJson = False,
) -> None:
    """Put a run into the queue, and start a server for it where none is running.

    It is started by `paceline train` in this folder, with this Python, as soon as it gets workers; options
    that are not listed here are those of `paceline train`.

    Example: paceline queue add train.py --workers 1-4 --priority 5 --epochs 3 -- --lr 0.1
    """
    from paceline.cli.queue_request import new_request, run_name
    from paceline.frontends.run_queue.queue_client import add_run, capacity_of
    from paceline.frontends.run_queue.queue_folder import QueueFolder

    folder = QueueFolder.at(queue)
    capacity = capacity_of(folder, folder.read())
    request = new_request(
        script,
        cast("tuple[str, ...]", ctx.meta[_ARGUMENTS]),
        workers,
        capacity,
        env or [],
    )
    named = replace(request, priority=priority, name=run_name(name, request.script))
    run = add_run(folder, named if run_dir is None else replace(named, run_dir=os.path.abspath(run_dir)))
    started = False if no_server else _serve(queue)
    if as_json:
        from paceline.cli.queue_display import plain

        echo_json(plain(run, capacity, time.time()))
        return
    echo(f"{run.label} is in the queue: {run.request.size} of {counted(capacity, 'worker')}")
    echo(f"its folder is {run.request.run_dir}")
    if started:
        echo(f"a server was started: {folder.server_log}")
    elif no_server and not folder.is_served:
        echo("no server is running: paceline queue serve")


@app.command("serve")
def serve(
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many workers all runs have together; kept. Default: GPUs of this machine, else cores.",
        ),
    ] = None,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when all runs have ended.")] = False,
    queue: Queue = None,
) -> None:
    """Serve the queue in the foreground: start runs, share workers among them, preempt and continue them.

    Ctrl-C or SIGTERM ends the server; runs train on, and the next server finds them again.

    Example: paceline queue serve --workers 8
    """
    from paceline.frontends.run_queue import serving
    from paceline.frontends.run_queue.queue_folder import QueueFolder

    folder = QueueFolder.at(queue)
    over: list[int] = []

    def end(number: int, frame: object) -> None:
        over.append(number)
        folder.wake()

    def tell(line: str) -> None:
        # The log lies on the queue's disk: where that is full, runs are served without it.
        with suppress(OSError):
            echo(f"{time.strftime('%H:%M:%S')} {line}")
            sys.stdout.flush()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        serving.serve(folder, workers, tell, until_empty=until_empty, is_over=lambda: bool(over))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if over:
        left = [run.label for run in folder.read().runs if run.state in ("running", "stopping")]
        if left:
            tell(f"{listed(left)} {'trains' if len(left) == 1 else 'train'} on without a server")
        if over[0] == signal.SIGINT:
            raise KeyboardInterrupt


@app.command("ls")
def list_queue(
    every: Annotated[bool, typer.Option("--all", "-a", help="Ended runs, too, however long ago.")] = False,
    queue: Queue = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of the queue in the order in which they get workers.

    Example: paceline queue ls
    """
    from paceline.cli.queue_display import print_table
    from paceline.frontends.run_queue.queue_folder import QueueFolder

    print_table(QueueFolder.at(queue), every, as_json)


@app.command("show")
def show(run: RunNumber, queue: Queue = None, as_json: AsJson = False) -> None:
    """Show one run: its command, its folder, what happened to it, and how it failed.

    Example: paceline queue show 7
    """
    from paceline.cli.queue_display import print_run
    from paceline.frontends.run_queue.queue_client import find_run
    from paceline.frontends.run_queue.queue_folder import QueueFolder

    folder = QueueFolder.at(queue)
    content = folder.read()
    print_run(find_run(content, run), folder, content, as_json)


@app.command("logs")
def logs(
    run: RunNumber,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what comes, until the run ends.")
    ] = False,
    lines: Annotated[
        int | None, typer.Option("--lines", "-n", help="Begin with the last N lines.", min=0)
    ] = None,
    queue: Queue = None,
) -> None:
    """Print what a run's script printed, over all its starts; `paceline logs` has those of its workers.

    Example: paceline queue logs 7 -f
    """
    from paceline.cli.queue_display import print_log
    from paceline.frontends.run_queue.queue_client import find_run
    from paceline.frontends.run_queue.queue_folder import QueueFolder

    folder = QueueFolder.at(queue)
    print_log(folder, find_run(folder.read(), run), follow, lines)


@app.command("wait")
def wait(
    runs: RunNumbers,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Give up after so many seconds, with exit code 3.")
    ] = None,
    queue: Queue = None,
) -> None:
    """Wait until runs have ended. Exit codes: 0 all have finished, 1 one failed or was cancelled, 3 timeout.

    Example: paceline queue wait 7 8 --timeout 3600
    """
    from paceline.core.clock import MonotonicClock
    from paceline.frontends.run_queue.queue_client import find_run
    from paceline.frontends.run_queue.queue_folder import QueueFolder
    from paceline.frontends.run_queue.queued_run import ENDED

    folder, clock = QueueFolder.at(queue), MonotonicClock()
    numbers = [str(find_run(folder.read(), word).id) for word in runs]
    begun = clock.now()
    while True:
        found = [find_run(folder.read(), number) for number in numbers]
        if all(run.state in ENDED for run in found):
            break
        if timeout is not None and clock.now() - begun >= timeout:
            still = [f"{run.label} is {run.state}" for run in found if run.state not in ENDED]
            echo(f"not ended after {timeout:g} s: {listed(still)}", err=True)
            raise typer.Exit(3)
        if not folder.is_served:
            _serve(queue)
        clock.sleep(0.2)
    for run in found:
        echo(f"{run.label}: {run.state}{f' ({run.reason})' if run.reason else ''}")
    if any(run.state != "finished" for run in found):
        raise typer.Exit(1)


@app.command("cancel")
def cancel(
    runs: RunNumbers,
    now: Annotated[
        bool, typer.Option("--now", help="Kill its processes; steps since the last checkpoint are lost.")
    ] = False,
    queue: Queue = None,
    no_server: NoServer = False,
) -> None:
    """Take runs out of the queue; one that trains finishes its step, saves and ends.

    Example: paceline queue cancel 7
    """
    _want(runs, "kill" if now else "cancel", queue, no_server)


@app.command("hold")
def hold(runs: RunNumbers, queue: Queue = None, no_server: NoServer = False) -> None:
    """Keep runs from getting workers; one that trains finishes its step, saves and ends, and can be released.

    Example: paceline queue hold 7
    """
    _want(runs, "hold", queue, no_server)


@app.command("release")
def release(runs: RunNumbers, queue: Queue = None, no_server: NoServer = False) -> None:
    """Let runs that are held get workers again.

    Example: paceline queue release 7
    """
    _want(runs, "run", queue, no_server)


@app.command("set")
def change(
    run: RunNumber,
    priority: Annotated[int | None, typer.Option(help="Another priority.")] = None,
    workers: Annotated[
        str | None, typer.Option(metavar="MIN-MAX", help="Another fewest and most number of workers.")
    ] = None,
    queue: Queue = None,
    no_server: NoServer = False,
) -> None:
    """Change the priority or the number of workers of a run, also while it trains.

    Example: paceline queue set 7 --priority 10 --workers 2-4
    """
    from paceline.cli.queue_request import parse_size
    from paceline.frontends.run_queue.queue_client import (
        capacity_of,
        change_run,
        check_shards,
        check_size,
        check_unit,
    )
    from paceline.frontends.run_queue.queue_folder import QueueFolder
    from paceline.frontends.run_queue.queued_run import ENDED, QueuedRun

    if priority is None and workers is None:
        raise UsageError("nothing is to be changed", remedy="give --priority or --workers")
    folder = QueueFolder.at(queue)
    size = None if workers is None else parse_size(workers)
    if size is not None:
        check_size(*size, capacity_of(folder, folder.read()))

    def changed(run: QueuedRun) -> QueuedRun:
        if run.state in ENDED:
            raise UsageError(f"{run.label} has ended: {run.state}", remedy="add it again, with --run-dir")
        request = run.request if priority is None else replace(run.request, priority=priority)
        if size is not None:
            check_unit(*size, request.per_node)
            check_shards(request.run_dir, size[0])
            request = replace(request, least=size[0], most=size[1])
        text = f"set to priority {request.priority}, workers {request.size}"
        return replace(run, request=request).noted(time.time(), text)

    after = change_run(folder, run, changed)
    if not no_server:
        _serve(queue)
    echo(f"{after.label}: priority {after.request.priority}, workers {after.request.size}")


@app.command("clear")
def clear(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Numbers or names; without any all that have ended.")
    ] = None,
    queue: Queue = None,
) -> None:
    """Take ended runs out of the list, with what they printed. Their folders stay: see `paceline gc`.

    Example: paceline queue clear
    """
    from paceline.frontends.run_queue.queue_client import find_run, forget
    from paceline.frontends.run_queue.queue_folder import QueueFolder
    from paceline.frontends.run_queue.queued_run import ENDED

    folder = QueueFolder.at(queue)
    named = [find_run(folder.read(), word) for word in runs or ()]
    for run in named:
        if run.state not in ENDED:
            raise UsageError(f"{run.label} is {run.state}", remedy=f"first: paceline queue cancel {run.id}")
    numbers = {run.id for run in named}
    gone = forget(folder, lambda run: not named or run.id in numbers)
    echo(f"{counted(len(gone), 'run')} cleared")


def _want(words: list[str], intent: Any, queue: str | None, no_server: bool) -> None:
    from paceline.frontends.run_queue.queue_client import want
    from paceline.frontends.run_queue.queue_folder import QueueFolder

    folder = QueueFolder.at(queue)
    for word in words:
        run = want(folder, word, intent)
        pending = run.state in ("running", "stopping")
        if pending and not no_server:
            _serve(queue)
        what = {"kill": "is being killed", "run": "continues"}.get(
            intent, "finishes its step, saves and ends"
        )
        echo(f"{run.label} {what if pending else f'is {run.state}'}")
    if not no_server:
        _serve(queue)


def _serve(queue: str | None) -> bool:
    """See to it that a server is there for a queue that has work; return whether it was started."""
    from paceline.frontends.run_queue.queue_folder import QueueFolder
    from paceline.frontends.run_queue.serving import start_server

    folder = QueueFolder.at(queue)
    return folder.read().has_work and start_server(folder)
