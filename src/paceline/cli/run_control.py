"""`paceline scale`, `paceline stop`, `paceline status`: talk to the supervisor of a run in progress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import AsJson, echo
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.control.messages import ToolReply
    from paceline.control.run_status import WorkerFacts

RunFolderArgument = Annotated[Path, typer.Argument(help="The folder of a run that trains now.")]
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


def status(run: RunFolderArgument, as_json: AsJson = False, token_file: Token = None) -> None:
    """Show what a run and each of its workers are doing.

    Example: paceline status runs/20250301-120000-train
    """
    from paceline.control.run_status import RunStatus

    found = RunStatus.from_plain(_ask(run, token_file, "status").facts)
    if as_json:
        typer.echo(json.dumps(found.to_plain()))
        return
    # The supervisor that control.json names may be of another user, like the folder.
    echo(f"{found.phase}, generation {found.generation}, step {found.step}")
    for worker in found.workers:
        echo(_line(worker))


def _line(worker: WorkerFacts) -> str:
    heard = "no heartbeat yet" if worker.heard is None else f"heartbeat {worker.heard:.1f} s ago"
    shards = ",".join(map(str, worker.shards)) or "none"
    return (
        f"rank {worker.rank}  pid {worker.pid}  {worker.host or '-'}  {worker.phase}  "
        f"step {worker.step}  shards {shards}  {heard}"
    )


def _ask(run: Path, token: Path | None, what: str, number: int = 0, text: str = "") -> ToolReply:
    from paceline.control.messages import ToolRequest
    from paceline.elastic.supervisor import tool_client

    answer = tool_client.ask(run, ToolRequest(what=what, number=number, text=text), token=token)
    if not answer.done:
        raise UsageError(answer.text, remedy="see `paceline status` for what the run is doing")
    return answer
