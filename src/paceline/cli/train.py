"""`paceline train`: run a training script with settings that win over those in it.

The script runs in this process as `__main__`, and ends it with its own exit code: 75 when it was asked to
stop and saved. Only the script imports torch.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Annotated, Any

import typer

from paceline.core.errors import PacelineError, UsageError


def train(
    script: Annotated[
        str | None, typer.Argument(help="The Python file that trains; or give --script.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script; put -- before those with dashes.")
    ] = None,
    script_file: Annotated[
        str | None, typer.Option("--script", metavar="FILE", help="The Python file that trains.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Settings of TrainConfig or DistributedConfig: TOML, JSON or YAML. Options win over it.",
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="How many workers compute.")] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option(help="Workers, one per GPU; on the CPU where there is no GPU."),
    ] = None,
    num_nodes: Annotated[
        int | None, typer.Option(help="Machines; 1: others come by `paceline join`.")
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each machine.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Refused: names what to use to train on several machines.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="pytorch-ddp; others are refused by name.")] = None,
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

    The script is started once, and starts its workers; `paceline run` starts a script once per rank. Exit
    codes: the script's own; 75 when it was asked to stop and saved (start it again with --resume auto).

    Example: paceline train script.py --workers 4 --chaos "kill rank=2 step=20" --set checkpoint.keep_last=5
    """
    from paceline.cli.train_layout import number_of_workers, settings_of_file
    from paceline.core.chaos_spec import Chaos

    file, rest = _chosen_script(script, script_file, arguments or [])
    texts, layout = checked_assignments(assignments or []), (workers, num_gpus, num_nodes, gpus_per_node)
    of_file: dict[str, Any] = {}
    if config is None:
        number = number_of_workers(*layout, address, backend)
    else:
        number, of_file, per_gpu = settings_of_file(config, layout, address, backend)
        texts, config = (*per_gpu, *texts), None if per_gpu else config
    given: dict[str, Any] = {
        "workers": number,
        "epochs": epochs,
        "run_dir": run_dir,
        "resume": int(resume) if resume is not None and resume.isdigit() else resume,
        "fault_tolerance.chaos": None if chaos is None else str(Chaos(chaos)),
        "fault_tolerance.min_workers": min_workers,
    }
    options = {**of_file, **{name: value for name, value in given.items() if value is not None}}
    _train(file, rest, options, texts, config)


def _train(
    script: str, arguments: list[str], options: dict[str, Any], texts: tuple[str, ...], config: str | None
) -> None:
    from paceline.frontends import overrides

    named = tuple(f"{name}={value}" for name, value in options.items())
    chosen = overrides.Overrides(options, texts, file=None if config is None else os.path.abspath(config))
    command = overrides.Command(
        script=os.path.abspath(script),
        arguments=tuple(arguments),
        folder=os.getcwd(),
        settings=(*chosen.assigned_by_file(), *named, *texts),
    )
    chosen = dataclasses.replace(chosen, command=command)
    with overrides.in_force(chosen):
        code = _run(script, command.arguments)
        if code == 0 and chosen and not overrides.applied():
            typer.echo(
                f"warning: {script} ended without Trainer.fit, so no setting given here had an effect",
                err=True,
            )
        elif code == 0 and _has_no_effect(texts, overrides.per_gpu_applied()):
            typer.echo(
                f"warning: {script} makes its own optimizer: learning_rate of the file had no effect",
                err=True,
            )
    if code:
        raise typer.Exit(code)


def _has_no_effect(texts: tuple[str, ...], has_ddp_trainer: bool) -> bool:
    return not has_ddp_trainer and any(text.startswith("per_gpu.learning_rate=") for text in texts)


def _chosen_script(script: str | None, named: str | None, arguments: list[str]) -> tuple[str, list[str]]:
    """Return the script and its arguments; with --script the first argument is the script's, too."""
    if named is not None:
        return named, arguments if script is None else [script, *arguments]
    if script is None:
        raise UsageError(
            "no script is given",
            remedy="name the file that trains: paceline train train.py, or --script FILE",
        )
    return script, arguments


def _run(script: str, arguments: tuple[str, ...]) -> int:
    from paceline.frontends.overrides import run_script, traceback_of_script

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
        print(traceback_of_script(error, script), end="", file=sys.stderr)
        return 1
    return 0


def checked_assignments(assignments: list[str]) -> tuple[str, ...]:
    """Return the texts of --set; UsageError for one that assigns nothing."""
    for text in assignments:
        name, equals, _ = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(
                f"--set {text}: not of the form key=value",
                remedy="write it like --set checkpoint.keep_last=5",
            )
    return tuple(assignments)
