"""`paceline tune`: search for good parameters of a script; `paceline tune show`: look at a search."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.cli.output import AsJson, echo, echo_json
from paceline.core.errors import UsageError
from paceline.core.wording import counted


class TuneGroup(TyperGroup):
    """`tune` itself, unless the first word is the name of another command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.commands and args[0] != "tune":
            return super().resolve_command(ctx, args)
        return "", self.commands["tune"], args

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Options before the script are those of `tune`, --help too.
        if not args:
            ctx.fail("Missing argument 'SCRIPT'.")
        return super().parse_args(ctx, ["--", *args])


app = typer.Typer(cls=TuneGroup, add_completion=False, rich_markup_mode=None)


@app.command("tune")
def tune(
    script: Annotated[str, typer.Argument(help="The Python file that trains and reports.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script, after --; {lr} stands for the parameter lr."),
    ] = None,
    space: Annotated[str, typer.Option(metavar="FILE", help="The search space, a TOML file.")] = "space.toml",
    samples: Annotated[int, typer.Option(help="Trials of the study when it is complete.")] = 100,
    parallel: Annotated[
        int | None, typer.Option(help="Trials at once; without it one per GPU, else per core.")
    ] = None,
    mode: Annotated[str, typer.Option(help="max or min: which values are better.")] = "max",
    sampler: Annotated[str | None, typer.Option(help="tpe, random, grid, qmc, cmaes or gp.")] = None,
    pruner: Annotated[str | None, typer.Option(help="asha, median or hyperband.")] = None,
    study: Annotated[str | None, typer.Option(help="A name below studies/, or a folder.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the sampler: the same trials are asked for.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the study.")] = False,
    engine: Annotated[str, typer.Option(help="local or ray.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster: auto, ray://HOST:10001.")] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the parameters with which a script does best: one process per trial, several at once.

    The script gets its parameters from paceline.tune.params() or its arguments, and calls
    paceline.tune.report(step, value); the last report is the trial's value. What it prints is in
    studies/NAME/trials/NUMBER/output.log. A search that was killed goes on with --resume.

    Example: paceline tune train.py --space space.toml --samples 100 --parallel 4 --pruner asha -- --lr {lr}
    """
    from paceline.frontends.tuner.distributed_tuner import DistributedTuner
    from paceline.frontends.tuner.script_trial import ScriptTrial
    from paceline.frontends.tuner.space_file import read_space

    if not os.path.isfile(script):
        raise UsageError(f"the script {script} is not there", remedy="give the path of a Python file")
    if resume and study is None:
        raise UsageError(
            "--resume does not say which study",
            remedy="add --study NAME; `paceline tune show` names the newest",
        )
    tuner = DistributedTuner(
        ScriptTrial(script, tuple(arguments or ())),
        read_space(space),
        num_gpus=parallel,
        mode=mode,
        sampler=sampler,
        pruner=pruner,
        study=study,
        seed=seed,
        engine=engine,
        ray_address=address,
    )
    tuner.tune(samples, resume=resume)
    _print(tuner.trials, mode, str(tuner.folder), as_json, listing=False)


@app.command("show")
def show(
    study: Annotated[
        str | None, typer.Argument(help="A study's folder or name; without one the newest below studies/.")
    ] = None,
    trial: Annotated[
        int | None, typer.Option(metavar="N", help="One trial: parameters, error, output.")
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw it: PNG, SVG or PDF.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a search: its trials, also while it runs, and the best so far.

    Example: paceline tune show --trial 7
    """
    from paceline.frontends.tuner import trial_table
    from paceline.frontends.tuner.distributed_tuner import require_optuna, study_folder

    require_optuna()
    from paceline.frontends.tuner.tuning_study import StoredStudy

    found = StoredStudy(_newest() if study is None else study_folder(study))
    if trial is not None:
        _print_trial(found, trial, as_json)
        return
    if plot is not None:
        path = trial_table.plot(found.trials, found.mode, found.metric, Path(plot))
        echo(f"wrote {path}", err=True)
    _print(found.trials, found.mode, str(found.folder), as_json, running=found.is_running)


def _newest() -> Path:
    from paceline.frontends.tuner.distributed_tuner import STUDIES
    from paceline.frontends.tuner.tuning_study import LOG_FILE

    files = list(Path(STUDIES).glob(f"*/{LOG_FILE}"))
    if not files:
        raise UsageError(
            f"no study is given, and there is none below {Path(STUDIES).absolute()}",
            remedy="give the folder of a study",
        )
    return max(files, key=lambda file: (file.stat().st_mtime, file)).parent


def _plain(one: Any) -> dict[str, Any]:
    return {**vars(one), "params": dict(one.params), "reports": dict(one.reports)}


def _print(
    trials: list[Any], mode: str, folder: str, as_json: bool, *, listing: bool = True, running: bool = False
) -> None:
    from paceline.frontends.tuner import trial_table
    from paceline.frontends.tuner.trial_record import best_of

    best = best_of(trials, mode)
    if as_json:
        plain = None if best is None else _plain(best)
        echo_json(
            {"study": folder, "running": running, "best": plain, "trials": [_plain(one) for one in trials]}
        )
        return
    if listing and trials:
        width = 160 if not sys.stdout.isatty() else os.get_terminal_size().columns
        for line in trial_table.table(trials, mode, None, width).splitlines():
            echo(line)
    over = sum(one.is_over for one in trials)
    state = f"{counted(over, 'trial')} over, {len(trials) - over} under way"
    echo(f"{folder}: {state}{', running' if running else ''}")
    if best is not None:
        echo(f"best: {trial_table.value_text(best.value)} in trial {best.number}")
        for name, value in best.params.items():
            echo(f"  {name} = {value!r}")


def _print_trial(found: Any, number: int, as_json: bool) -> None:
    from paceline.frontends.tuner import trial_table
    from paceline.frontends.tuner.trial_record import OUTPUT, trial_folder

    if not 0 <= number < len(found.trials):
        raise UsageError(
            f"there is no trial {number} in {found.folder}",
            remedy=f"give one from 0 to {len(found.trials) - 1}",
        )
    one = found.trials[number]
    if as_json:
        echo_json(_plain(one))
        return
    echo(f"trial {number}: {one.state}, value {trial_table.value_text(one.value)}")
    for name, value in one.params.items():
        echo(f"  {name} = {value!r}")
    for step, value in one.reports.items():
        echo(f"  step {step}: {trial_table.value_text(value)}")
    if one.error:
        echo(one.error.rstrip())
    echo(f"its output: {trial_folder(found.folder, number) / OUTPUT}")
