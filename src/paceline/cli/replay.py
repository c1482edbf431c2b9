"""`paceline replay`: one shard's gradient computed again, and its hash beside the one in the journal.

Must not know how; and imports torch only by running the script.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.core.foreign import REDACTED, shown

if TYPE_CHECKING:
    from paceline.train.replay import Replayed

_SHOWN = 12


def replay(
    run: Annotated[str, typer.Argument(help="A run's folder.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After --: arguments of the script, in the place of the recorded ones."),
    ] = None,
    step: Annotated[int, typer.Option(help="The step, counted from 1.")] = ...,  # type: ignore[assignment]
    shard: Annotated[int, typer.Option(help="The shard, counted from 0.")] = ...,  # type: ignore[assignment]
    script: Annotated[
        str | None, typer.Option(help="The script that made the run, where it was moved or not recorded.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compute one shard's gradient of one step again and compare its hash; exit code 1 where it differs.

    Steps whose shards are hashed in the run are those of TrainConfig(audit_every=n).

    Example: paceline replay runs/20250301-120000-train --step 40 --shard 3
    """
    from paceline.frontends import replaying

    command = replaying.command_to_run(run, script, arguments or (), "replay")
    chosen = command.script
    if not as_json:
        echo(f"script      {shlex.join([chosen, *command.arguments])}")
        if REDACTED in " ".join(command.arguments):
            echo("note        what names a secret was not recorded: give all arguments after -- to use it")
    found = replaying.replay_script(run, step, shard, chosen, command)
    if as_json:
        plain = dataclasses.asdict(found)
        plain["loss"] = None if math.isnan(found.loss) else found.loss
        echo(json.dumps({"script": chosen, "arguments": [*command.arguments], **plain}, indent=2))
    else:
        _print(found)
    if found.same is False:
        raise typer.Exit(1)


def _print(found: Replayed) -> None:
    begin = "the beginning" if found.checkpoint is None else f"checkpoint {found.checkpoint}"
    echo(f"state       from {begin}, then {found.redone} step{'' if found.redone == 1 else 's'} again")
    if found.strayed is not None:
        echo(
            f"warning     from step {found.strayed} on the loss is not the journal's: the script, its data "
            "or the starting weights are not those of the run"
        )
    listed = ", ".join(map(str, found.samples[:_SHOWN]))
    more = ", ..." if len(found.samples) > _SHOWN else ""
    echo(f"samples     {len(found.samples)}: {listed}{more}; loss {found.loss:.6g}")
    who = "" if found.rank is None else f" on rank {found.rank}"
    echo(f"computed    {found.hash}  here")
    if found.recorded is None:
        echo(f"recorded    none: step {found.step} was not audited (TrainConfig(audit_every=n))")
        return
    echo(f"recorded    {found.recorded} {who}")
    what = "the same bits" if found.same else "OTHER BITS"
    echo(f"step {found.step}, shard {found.shard}: {what}")


def echo(text: str, *, err: bool = False) -> None:
    """The run's folder may come from elsewhere."""
    typer.echo(shown(text), err=err)
