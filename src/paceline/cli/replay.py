"""`paceline replay`: compute one shard's gradient again, compare its hash. Only the script imports torch."""

from __future__ import annotations

import dataclasses
import math
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import AsJson, OptionalRun, Script, ScriptArguments, echo, echo_json
from paceline.core.untrusted import REDACTED
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.train.loop.recompute import ReplayedShard

_SHOWN = 12


def replay(
    run: OptionalRun = None,
    arguments: ScriptArguments = None,
    step: Annotated[int, typer.Option(help="The step, counted from 1.")] = ...,  # type: ignore[assignment]
    shard: Annotated[int, typer.Option(help="The shard, counted from 0.")] = ...,  # type: ignore[assignment]
    script: Script = None,
    as_json: AsJson = False,
) -> None:
    """Compute one shard's gradient of one step again and compare its hash; exit code 1 where it differs.

    Steps whose shards are hashed in the run are those of TrainConfig(audit_every=n).

    Example: paceline replay runs/20250301-120000-train --step 40 --shard 3
    """
    from paceline.cli.run_choice import chosen
    from paceline.frontends import recomputation

    path = chosen(run).absolute()  # the script runs in another folder
    command = recomputation.command_to_run(path, script, arguments or (), "replay")
    if not as_json:
        echo(f"script      {shlex.join([command.script, *command.arguments])}")
        if REDACTED in " ".join(command.arguments):
            echo("note        what names a secret was not recorded: give all arguments after -- to use it")
    found = recomputation.compute_in_script(
        command, lambda trainer, data: recomputation.replay_fit(trainer, path, step, shard, data)
    )
    if as_json:
        plain = dataclasses.asdict(found)
        plain["loss"] = None if math.isnan(found.loss) else found.loss
        echo_json({"script": command.script, "arguments": [*command.arguments], **plain})
    else:
        _print(found)
    if found.same is False:
        raise typer.Exit(1)


def _print(found: ReplayedShard) -> None:
    begin = "the beginning" if found.checkpoint is None else f"checkpoint {found.checkpoint}"
    echo(f"state       from {begin}, then {counted(found.redone, 'step')} again")
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
