"""`paceline train`: run a training script with settings that win over those in it.

The script runs in this process as `__main__`, and ends it with its own exit code: 75 when it was asked to
stop and saved. Only the script imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.engine_options import (
    EngineAssignments,
    EngineName,
    EngineOptions,
    Image,
    Nodes,
    RayAddress,
    SlurmOptions,
    WorkersPerNode,
    check_size_and_backend,
    one_of,
)
from paceline.cli.train_options import (
    Assignments,
    BackendName,
    ChaosText,
    ConfigFile,
    DryRun,
    Epochs,
    GpusPerNode,
    MinWorkers,
    NumGpus,
    NumNodes,
    OptionalScript,
    Resume,
    RunDir,
    ScriptFile,
    TrainArguments,
    WorkerTotal,
)
from paceline.core.errors import PacelineError, UsageError

if TYPE_CHECKING:
    from paceline.engines.engine import Engine
    from paceline.engines.slurm.allocation import StepTask
    from paceline.frontends.overrides import Overrides


def train(
    script: OptionalScript = None,
    arguments: TrainArguments = None,
    script_file: ScriptFile = None,
    config: ConfigFile = None,
    workers: WorkerTotal = None,
    num_gpus: NumGpus = None,
    num_nodes: NumNodes = None,
    gpus_per_node: GpusPerNode = None,
    address: RayAddress = None,
    backend: BackendName = None,
    engine: EngineName = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = None,
    image: Image = None,
    slurm: SlurmOptions = None,
    engine_settings: EngineAssignments = None,
    dry_run: DryRun = False,
    epochs: Epochs = None,
    run_dir: RunDir = None,
    resume: Resume = None,
    chaos: ChaosText = None,
    min_workers: MinWorkers = None,
    assignments: Assignments = None,
) -> None:
    """Run a training script; what is set here wins over the script's own TrainConfig.

    The script is started once, and starts its workers; `paceline run` starts a script once per rank. Exit
    codes: the script's own; 75 when it was asked to stop and saved (start it again with --resume auto).

    With --engine the workers run on other machines, and this process waits for them.

    Example: paceline train script.py --workers 4 --chaos "kill rank=2 step=20" --set checkpoint.keep_last=5
    """
    from paceline.cli import train_layout
    from paceline.cli.setting_checks import checked_assignments
    from paceline.core.chaos_spec import Chaos
    from paceline.frontends.ddp_trainer.config_file import PerGpuFile
    from paceline.frontends.overrides import Overrides

    file, rest = _chosen_script(script, script_file, arguments or [])
    found = None if config is None else PerGpuFile.read(config)
    is_for_ray = found is not None and found.config.backend == "ray" and backend in (None, "ray")
    if backend == "ray" or (is_for_ray and engine is None):
        engine, backend = one_of(engine, "ray", "--engine", "--backend"), "pytorch-ddp"
    if (task := _slurm_task()) is not None:
        engine = engine or "slurm"
    if engine is not None:
        nodes = one_of(nodes, num_nodes, "--nodes", "--num-nodes")
    of_engine = (gpus_per_node, address) if engine else (None, None)
    lists = (engine_settings or [], slurm or [])
    options = EngineOptions(engine, nodes, workers_per_node, *of_engine, image, *lists)
    chosen = train_layout.sized(options, found if is_for_ray else None, workers or num_gpus).chosen()
    if chosen is not None:
        check_size_and_backend(chosen, workers, num_gpus, backend)
        address = num_nodes = num_gpus = gpus_per_node = None
        workers = chosen.nodes * chosen.workers_per_node
    texts, layout = checked_assignments(assignments or []), (workers, num_gpus, num_nodes, gpus_per_node)
    number, of_file, per_gpu = train_layout.settings_of_file(found, layout, address, backend)
    given: dict[str, Any] = {
        "engine": chosen,
        "workers": number,
        "epochs": epochs,
        "run_dir": run_dir,
        "resume": int(resume) if resume is not None and resume.isdigit() else resume,
        "fault_tolerance.chaos": None if chaos is None else str(Chaos(chaos)),
        "fault_tolerance.min_workers": min_workers,
    }
    settings = {**of_file, **{name: value for name, value in given.items() if value is not None}}
    texts = (*per_gpu, *texts, *train_layout.backend_settings(backend))
    asked = Overrides(settings, texts, file=os.path.abspath(config) if config and found is None else None)
    if dry_run:
        _print_request(chosen, asked)
    else:
        _train(file, rest, asked, task)


def _slurm_task() -> StepTask | None:
    """Return which task of an srun of several this process is; None where there is one task."""
    if "SLURM_STEP_ID" not in os.environ:
        return None
    from paceline.engines.slurm.allocation import StepTask

    return StepTask.from_environment()


def _slurm_step(task: StepTask | None) -> contextlib.AbstractContextManager[None]:
    """Return what the first task of an srun trains in. The other tasks wait for its end, and end here."""
    if task is None:
        return contextlib.nullcontext()
    from paceline.engines.slurm.step_tasks import first_task, wait_for_first_task

    if task.rank == 0:
        return first_task(task, Path.cwd())
    wait_for_first_task(task, Path.cwd())
    raise typer.Exit(0)


def _train(script: str, arguments: list[str], chosen: Overrides, task: StepTask | None) -> None:
    from paceline.frontends import overrides

    # An engine is an object, and no assignment; where a run ran is no part of what made its weights.
    named = tuple(f"{name}={value}" for name, value in chosen.options.items() if name != "engine")
    command = overrides.Command(
        script=os.path.abspath(script),
        arguments=tuple(arguments),
        folder=os.getcwd(),
        settings=(*chosen.assigned_by_file(), *named, *chosen.assignments),
    )
    chosen = dataclasses.replace(chosen, command=command)
    with _slurm_step(task), overrides.in_force(chosen):
        code = _run(script, command.arguments)
        if code == 0 and chosen and not overrides.applied():
            typer.echo(
                f"warning: {script} ended without Trainer.fit, so no setting given here had an effect",
                err=True,
            )
        elif code == 0 and (what := _without_effect(chosen.assignments, overrides.per_gpu_applied())):
            typer.echo(f"warning: {script} {what} had no effect", err=True)
    if code:
        raise typer.Exit(code)


def _print_request(engine: Engine | None, settings: Overrides) -> None:
    from paceline.cli.engine_options import request_text

    if engine is None:
        raise UsageError(
            "--dry-run prints what an engine would be asked for, and none is chosen",
            remedy="add --engine; --set dry_run=true tries a few steps on this machine",
        )
    typer.echo(request_text(engine, settings), nl=False)


def _without_effect(texts: tuple[str, ...], was_read: bool) -> str:
    """Return why a setting of DistributedConfig had no effect; `was_read`: whether a trainer read them."""
    named = set[str]() if was_read else {text.partition("=")[0] for text in texts}
    if "per_gpu.backend" in named:
        return "makes a trainer that --backend does not choose (see paceline.make_trainer): --backend"
    return "makes its own optimizer: learning_rate of the file" if "per_gpu.learning_rate" in named else ""


def _chosen_script(script: str | None, named: str | None, arguments: list[str]) -> tuple[str, list[str]]:
    """Return the script, which can be read, and its arguments; with --script the first argument is the
    script's, too."""
    from paceline.cli.setting_checks import check_script

    if named is not None:
        arguments = arguments if script is None else [script, *arguments]
    chosen = script if named is None else named
    if chosen is None:
        raise UsageError(
            "no script is given",
            remedy="name the file that trains: paceline train train.py, or --script FILE",
        )
    check_script(chosen)
    return chosen, arguments


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
