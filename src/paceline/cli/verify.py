"""`paceline verify`: steps of a run computed again, and whether the same numbers come out.

Must not know how; and imports torch only by running the script.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.replay import echo
from paceline.core.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from paceline.train.verify import Interval, Verified

_WORDS = {
    "loss": "its loss",
    "sample": "the weights that it begins with",
    "hash": "the hash of the state after it",
    "checkpoint": "the checkpoint that was saved after it",
    "end": "the hash that the run ended with",
}


def verify(
    run: Annotated[str, typer.Argument(help="A run's folder.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="After --: arguments of the script, in the place of the recorded ones."),
    ] = None,
    steps: Annotated[
        str, typer.Option(help="all: from the beginning; sample=N: N steps from the kept checkpoints.")
    ] = "all",
    script: Annotated[
        str | None, typer.Option(help="The script that made the run, where it was moved or not recorded.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Compute steps of a run again, in one process, and compare the numbers with those that were recorded.

    Exit code 0: the same bits; 1: other bits, with the first step that differs; 2: it cannot be computed
    again here. `sample=N` takes the checkpoints for right that it begins with; only `all` proves the result.

    Example: paceline verify runs/20250301-120000-train --steps sample=20
    """
    from paceline.frontends import replaying

    number = _number(steps)
    command = replaying.command_to_run(run, script, arguments or (), "verify")
    chosen = command.script
    if not as_json:
        echo(f"script      {shlex.join([chosen, *command.arguments])}")
    try:
        found = replaying.verify_script(run, number, chosen, command)
    except UsageError:
        raise
    except PacelineError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps({"same": found.same, **dataclasses.asdict(found)}, indent=2))
    else:
        _print(found)
    if not found.same:
        raise typer.Exit(1)


def _number(steps: str) -> int | None:
    if steps == "all":
        return None
    match = re.fullmatch(r"sample=(\d+)", steps)
    if match is None or int(match[1]) < 1:
        raise UsageError(
            f"--steps {steps!r} is not a choice of steps", remedy="give --steps all, or --steps sample=20"
        )
    return int(match[1])


def _print(found: Verified) -> None:
    for interval in found.intervals:
        echo(f"computed    {_span(interval)}")
    told = ", ".join(f"{count:,} of {what}" for what, count in found.compared.items())
    echo(f"the same    {told or 'nothing'}")
    different = found.different
    if different is not None:
        echo(f"recorded    {different.recorded}")
        echo(f"computed    {different.computed}  here")
        echo(
            f"step {different.step}: OTHER BITS: {_WORDS[different.what]} came out otherwise, in "
            f"{_span(different.interval)}"
        )
        if different.step == different.interval.first:
            echo(
                "the first computed step is other already: does the script make the same data and the "
                "same model each time it runs? Seed what it draws (torch.manual_seed, a generator)"
            )
    elif found.complete:
        echo(f"all {found.steps:,} steps: the same bits")
    else:
        echo(f"{found.steps:,} steps: the same bits, from checkpoints that are taken for right")


def _span(interval: Interval) -> str:
    begin = "the beginning" if interval.version is None else f"checkpoint {interval.version}"
    if interval.first == interval.last:
        return f"step {interval.first} from {begin}"
    return f"steps {interval.first} to {interval.last} from {begin}"
