"""`paceline verify`: compute steps of a run again, and compare the numbers. Only the script imports torch."""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.output import AsJson, OptionalRun, Script, ScriptArguments, echo, echo_json
from paceline.core.errors import PacelineError, UsageError
from paceline.core.wording import counted

if TYPE_CHECKING:
    from paceline.train.loop.recompute import StepInterval, VerifiedRun

_WORDS = {
    "loss": "its loss",
    "sample": "the weights that it begins with",
    "hash": "the hash of the state after it",
    "checkpoint": "the checkpoint that was saved after it",
    "end": "the hash that the run ended with",
}


def verify(
    run: OptionalRun = None,
    arguments: ScriptArguments = None,
    steps: Annotated[
        str, typer.Option(help="all: from the beginning; sample=N: N steps from the kept checkpoints.")
    ] = "all",
    script: Script = None,
    as_json: AsJson = False,
) -> None:
    """Compute steps of a run again, in one process, and compare the numbers with those that were recorded.

    Exit code 0: the same bits; 1: other bits, with the first step that differs; 2: it cannot be computed
    again here. `sample=N` assumes that the checkpoints it begins with are right; only `all` proves the
    result.

    Example: paceline verify runs/20250301-120000-train --steps sample=20
    """
    from paceline.cli.run_choice import chosen
    from paceline.frontends import recomputation

    number = _number(steps)
    path = chosen(run).absolute()  # the script runs in another folder
    command = recomputation.command_to_run(path, script, arguments or (), "verify")
    if not as_json:
        echo(f"script      {shlex.join([command.script, *command.arguments])}")
    try:
        found = recomputation.compute_in_script(
            command, lambda trainer, data: recomputation.verify_fit(trainer, path, number, data)
        )
    except UsageError:
        raise
    except PacelineError as error:
        echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        echo_json({"same": found.same, **dataclasses.asdict(found)})
    else:
        print_verified(found)
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


def print_verified(found: VerifiedRun) -> None:
    for interval in found.intervals:
        echo(f"computed    {_span(interval)}")
    compared = ", ".join(f"{count:,} of {what}" for what, count in found.compared.items())
    echo(f"the same    {compared or 'nothing'}")
    different = found.different
    if different is not None:
        echo(f"recorded    {different.recorded}")
        echo(f"computed    {different.computed}  here")
        echo(
            f"step {different.step}: OTHER BITS: {_WORDS[different.what]} came out differently, in "
            f"{_span(different.interval)}"
        )
        if different.step == different.interval.first:
            echo(
                "the first computed step differs already: does the script make the same data and the "
                "same model each time it runs? Seed what it draws (torch.manual_seed, a generator)"
            )
    elif found.complete:
        every = "the only step" if found.steps == 1 else f"all {counted(found.steps, 'step')}"
        echo(f"{every}: the same bits")
    else:
        steps = counted(found.steps, "step")
        echo(f"{steps}: the same bits, from checkpoints that are assumed to be right")


def _span(interval: StepInterval) -> str:
    begin = "the beginning" if interval.version is None else f"checkpoint {interval.version}"
    if interval.first == interval.last:
        return f"step {interval.first} from {begin}"
    return f"steps {interval.first} to {interval.last} from {begin}"
