"""`paceline scale`, `paceline stop`, `paceline status`: talk to the supervisor of a run in progress."""

from __future__ import annotations

import json
import math
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import AsJson, OptionalRun, echo, echo_json
from paceline.core.errors import PacelineError, UsageError
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.control.messages import ToolReply
    from paceline.control.run_status import WorkerFacts

_RECENT_STEPS = 100

RunFolderArgument = Annotated[
    Path, typer.Argument(help="A run that trains now: its folder, or its name below runs/.")
]
Token = Annotated[
    Path | None,
    typer.Option("--token-file", help="A copy of control.secret, where the folder belongs to another user."),
]


def scale(
    run: RunFolderArgument,
    workers: Annotated[int, typer.Option("--workers", "-n", help="How many workers are wanted.")],
    token_file: Token = None,
) -> None:
    """Give a run more or fewer workers while it trains. The result does not depend on their number.

    Example: paceline scale runs/20250301-120000-train --workers 6
    """
    if workers < 1:
        raise UsageError(f"{workers} workers cannot train", remedy="give 1 or more, or use `paceline stop`")
    echo(_ask(run, token_file, "scale", number=workers).text)


def stop(
    run: RunFolderArgument,
    reason: Annotated[str, typer.Option(help="Why, for the journal.")] = "paceline stop",
    token_file: Token = None,
) -> None:
    """Have a run finish its step, save, and end. It can be resumed.

    Example: paceline stop runs/20250301-120000-train
    """
    echo(_ask(run, token_file, "stop", text=reason).text)


def status(run: OptionalRun = None, as_json: AsJson = False, token_file: Token = None) -> None:
    """Show what a run and each of its workers are doing; of a run that is over, how it ended.

    Exit codes: 0 it trains, 3 it has ended, 4 it was killed; docs/runs.md has the others.

    Example: paceline status runs/20250301-120000-train
    """
    from paceline.cli.run_choice import chosen
    from paceline.control.run_status import RunStatus
    from paceline.elastic.supervisor import tool_client

    path = chosen(run)
    try:
        found = RunStatus.from_plain(_ask(path, token_file, "status").facts)
    except tool_client.NotRunningError as error:
        if error.exit_code not in (tool_client.ENDED_EXIT_CODE, tool_client.KILLED_EXIT_CODE):
            raise
        _print_end(path, as_json)
        raise typer.Exit(error.exit_code) from None
    times = _recent_times(path)
    if as_json:
        typer.echo(json.dumps({**found.to_plain(), "recent": times}))
        return
    # The supervisor that control.json names may be of another user, like the folder.
    echo(f"{found.phase}, generation {found.generation}, step {found.step}")
    if times:
        echo(
            f"last {counted(int(times['steps']), 'step')}: {times['samples_per_second']:,.0f} samples/s, "
            f"communication {times['communication_share']:.1%}, data {times['data_share']:.1%}, computing "
            f"{times['compute_efficiency']:.1%}"
        )
    for worker in found.workers:
        echo(worker_line(worker))


def _print_end(path: Path, as_json: bool) -> None:
    """Tell how a run ended, from its journal."""
    import time

    from paceline.cli.runs import age_text, plain
    from paceline.monitor.number_format import number
    from paceline.train.state.run_listing import look_at

    run, now = look_at(path.absolute()), time.time()
    if as_json:
        echo_json({"phase": run.phase, **plain(run, now), "hash": run.hash})
        return
    reason = run.reason or ("killed: the journal has no end" if run.phase == "interrupted" else "")
    because = f" ({reason})" if reason else ""
    echo(f"{run.phase}{because} after step {run.step}, {age_text(now - run.changed)} ago")
    facts = {
        "loss": "" if math.isnan(run.loss) else number(run.loss),
        "state": run.hash,
        "saved": counted(run.versions, "checkpoint") if run.versions else "",
    }
    for name, text in facts.items():
        if text:
            echo(f"{name:<6} {text}")
    if run.phase != "finished" and run.versions:
        echo('try    start it again with resume="auto": it continues from its newest checkpoint')


def _recent_times(run: Path) -> dict[str, float]:
    """Return what the time of the newest steps in the journal went to; empty where none was measured."""
    from paceline.core import journal
    from paceline.core.events import StepCommitted

    steps: deque[StepCommitted] = deque(maxlen=_RECENT_STEPS)
    # The folder of another user may be closed to this one.
    with suppress(OSError, PacelineError):
        for event in journal.last_events(run / "journal.jsonl"):
            if isinstance(event, StepCommitted) and event.comm_time is not None:
                steps.append(event)
    seconds = sum(step.seconds for step in steps)
    if seconds <= 0.0:
        return {}
    return {
        "steps": len(steps),
        "samples_per_second": sum(step.samples for step in steps) / seconds,
        "communication_share": sum(step.comm_time or 0.0 for step in steps) / seconds,
        "data_share": sum(step.data_time or 0.0 for step in steps) / seconds,
        "compute_efficiency": sum((step.compute_efficiency or 0.0) * step.seconds for step in steps)
        / seconds,
    }


def worker_line(worker: WorkerFacts) -> str:
    """Return what one worker does, how fast it computes and what memory it has, as far as it has said so."""
    from paceline.cli.output import size_text

    heard = "no heartbeat yet" if worker.heard is None else f"heartbeat {worker.heard:.1f} s ago"
    shards = ",".join(map(str, worker.shards)) or "none"
    parts = [
        f"rank {worker.rank}  pid {worker.pid}  {worker.host or '-'}  {worker.phase}",
        f"step {worker.step}  shards {shards}",
        f"{worker.shard_seconds * 1e3:.3g} ms per shard" if worker.shard_seconds > 0.0 else "",
        size_text(worker.rss) if worker.rss else "",
        heard,
    ]
    return "  ".join(part for part in parts if part)


def _ask(run: Path, token: Path | None, what: str, number: int = 0, text: str = "") -> ToolReply:
    from paceline.cli.run_choice import chosen
    from paceline.control.messages import ToolRequest
    from paceline.elastic.supervisor import tool_client

    answer = tool_client.ask(chosen(run), ToolRequest(what=what, number=number, text=text), token=token)
    if not answer.done:
        raise UsageError(answer.text, remedy="see `paceline status` for what the run is doing")
    return answer
