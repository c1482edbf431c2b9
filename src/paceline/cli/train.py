"""`paceline train`: run a training script with settings that win over those in it.

The script runs in this process as `__main__`, and ends it with its own exit code: 75 when it was asked to
stop and saved. Only the script imports torch.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated, Any

import typer

from paceline.core.errors import PacelineError, UsageError


def train(
    script: Annotated[str, typer.Argument(help="The Python file that calls Trainer.fit.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script; put -- before those with dashes.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many workers compute.")] = None,
    epochs: Annotated[int | None, typer.Option(help="How many passes over the data.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="The folder of the run.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with a run: auto, the number of a checkpoint, or a tag.")
    ] = None,
    chaos: Annotated[
        str | None,
        typer.Option(help='Faults to inject, such as "kill rank=2 step=20; slow rank=0 factor=3".'),
    ] = None,
    min_workers: Annotated[
        int | None, typer.Option(help="Stop with a verdict when fewer than these are left.")
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of TrainConfig; repeatable."),
    ] = None,
) -> None:
    """Run a training script; what is set here wins over the script's own TrainConfig.

    Exit codes: the script's own; 75 when it was asked to stop and saved (start it again with --resume auto).

    Example: paceline train script.py --workers 4 --chaos "kill rank=2 step=20" --set checkpoint.keep_last=5
    """
    from paceline.core.chaos_spec import Chaos
    from paceline.frontends import overrides

    given: dict[str, Any] = {
        "workers": workers,
        "epochs": epochs,
        "run_dir": run_dir,
        "resume": int(resume) if resume is not None and resume.isdigit() else resume,
        "fault_tolerance.chaos": None if chaos is None else str(Chaos(chaos)),
        "fault_tolerance.min_workers": min_workers,
    }
    options = {name: value for name, value in given.items() if value is not None}
    texts = _checked(assignments or [])
    command = overrides.Command(
        script=os.path.abspath(script),
        arguments=tuple(arguments or ()),
        folder=os.getcwd(),
        settings=(*(f"{name}={value}" for name, value in options.items()), *texts),
    )
    chosen = overrides.Overrides(options, texts, command)
    with overrides.in_force(chosen):
        code = _run(script, command.arguments)
        if code == 0 and chosen and not overrides.applied():
            typer.echo(
                f"warning: {script} ended without Trainer.fit, so no setting given here had an effect",
                err=True,
            )
    if code:
        raise typer.Exit(code)


def _run(script: str, arguments: tuple[str, ...]) -> int:
    from paceline.frontends.overrides import run_script

    try:
        run_script(script, arguments)
    except PacelineError:
        raise
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception as error:
        # The script's mistake, shown as Python would: from its own first line on.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != os.path.abspath(script):
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return 1
    return 0


def _checked(assignments: list[str]) -> tuple[str, ...]:
    for text in assignments:
        name, equals, _ = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"--set {text}: not of the form key=value",
                remedy="write it like --set checkpoint.keep_last=5",
            )
    return tuple(assignments)
