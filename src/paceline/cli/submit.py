"""`paceline submit`: hand a run over to an engine. The engine runs it without this terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from paceline.cli.engine_options import (
    EngineAssignments,
    EngineName,
    EngineOptions,
    Image,
    Kind,
    Nodes,
    RayAddress,
    SlurmOptions,
    WorkersPerNode,
    one_of,
)
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.cli.submit_to_queue import QueueBatch
    from paceline.engines.batch import BatchEngine, BatchSpec
    from paceline.engines.engine import Engine


def submit(
    script: Annotated[str, typer.Argument(help="The Python file that trains.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script; put -- before those with dashes.")
    ] = None,
    engine: EngineName = None,
    nodes: Nodes = None,
    workers_per_node: WorkersPerNode = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each machine.")] = None,
    address: RayAddress = None,
    image: Image = None,
    kind: Kind = None,
    time_limit: Annotated[
        str, typer.Option("--time", metavar="H:MM:SS", help="How long the run may take.")
    ] = "",
    name: Annotated[str | None, typer.Option(help="The run's name; default: the script's.")] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="Settings of TrainConfig.")] = None,
    run_dir: Annotated[str | None, typer.Option(help="The folder of the run, which all nodes see.")] = None,
    slurm: SlurmOptions = None,
    engine_settings: EngineAssignments = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of TrainConfig; repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print what would be submitted, and submit nothing.")] = False,
    wait: Annotated[
        bool, typer.Option(help="Wait for the end, show the log, and end as the run does.")
    ] = False,
) -> None:
    """Hand a run over to an engine: `paceline train` runs there, the supervisor on its first node.

    Prints the engine's identifier of the run. With --wait the exit code is the run's.

    Example: paceline submit train.py --engine slurm --nodes 4 --time 2:00:00 --slurm partition=gpu
    """
    from paceline.cli.setting_checks import check_script, check_settings, folder_of_handed_over_run
    from paceline.engines.batch import BatchEngine, BatchSpec
    from paceline.engines.engine import gpus_per_node as gpus_of

    options = EngineOptions(
        engine,
        nodes,
        workers_per_node,
        gpus_per_node,
        address,
        image,
        engine_settings or [],
        slurm or [],
        kind,
    )
    chosen = options.chosen()
    if chosen is None:
        raise UsageError("a run is handed over to an engine", remedy="add --engine slurm, or another one")
    if dry_run and wait:
        raise UsageError("--dry-run submits nothing that --wait could wait for", remedy="give one of them")
    check_script(script)
    check_settings(assignments or [], config)
    _check_time(time_limit, slurm or [])
    folder_of_file = folder_of_handed_over_run(assignments or [], config)
    folder = run_dir or folder_of_file
    train_options = [part for text in assignments or [] for part in ("--set", text)]
    train_options += _option("--config", config)
    job = BatchSpec(
        script=script,
        arguments=tuple(arguments or []),
        options=(*train_options, *_option("--run-dir", folder)),
        agent_options=_tls_of_agents(assignments or [], config),
        name=name or Path(script).stem,
        nodes=chosen.nodes,
        workers_per_node=chosen.workers_per_node,
        gpus_per_node=gpus_of(chosen),
        time=time_limit,
        image=image or "",
        folder=os.getcwd(),
        python=sys.executable,
    )
    queue = None if isinstance(chosen, BatchEngine) else _local_queue(options, job, train_options, folder)
    _hand_over(chosen, queue, job, dry_run=dry_run, wait=wait)


def _tls_of_agents(assignments: list[str], config: str | None) -> tuple[str, ...]:
    """Return the options of agents that a run with these settings accepts over TLS; the files are nodes'."""
    from paceline.frontends.ddp_trainer.config_file import PerGpuFile
    from paceline.frontends.overrides import PER_GPU, Overrides
    from paceline.train.settings.train_config import TrainConfig

    texts = tuple(text for text in assignments if not text.startswith(PER_GPU))
    # A file of settings per GPU has none of TLS.
    file = None if config is None or PerGpuFile.read(config) is not None else config
    care = Overrides({}, texts, file=file).apply(TrainConfig()).fault_tolerance
    given = {"--certificate": care.certificate, "--key": care.key, "--authority": care.authority}
    return tuple(word for name, value in given.items() for word in _option(name, value))


def _check_time(text: str, slurm: list[str]) -> None:
    """Refuse a limit that is no time, or that stands twice and differs."""
    from paceline.engines.time_limit import seconds_of

    if text:
        seconds_of(text)
    given = dict(text.split("=", 1) for text in slurm if "=" in text).get("time")
    one_of(text or None, given, "--time", "--slurm time")


def _local_queue(options: EngineOptions, job: BatchSpec, train: list[str], run_dir: str | None) -> QueueBatch:
    """Return a queue of this machine, for an engine that runs while its caller does."""
    from paceline.cli.submit_to_queue import QueueBatch

    if job.time:
        raise UsageError(
            f"--time {job.time}: the engine {options.engine} knows no limit", remedy="leave it out"
        )
    words = [job.script, "--engine", str(options.engine), "--workers-per-node", str(job.workers_per_node)]
    words += [part for text in options.settings for part in ("--engine-set", text)]
    return QueueBatch([*words, *train], job, run_dir)


def _hand_over(
    chosen: Engine, queue: QueueBatch | None, job: BatchSpec, *, dry_run: bool, wait: bool
) -> None:
    """Hand the run to the engine, or to the queue where the engine takes none."""
    from paceline.engines.batch import check_hand_over

    taker = cast("BatchEngine", chosen) if queue is None else queue
    if dry_run:
        typer.echo(taker.batch_text(job), nl=False)
        return
    check_hand_over(chosen)
    identifier = taker.submit_batch(job)
    typer.echo(identifier)
    if wait:
        from paceline.cli.submit_wait import follow

        raise typer.Exit(follow(taker, identifier))


def _option(name: str, value: str | None) -> list[str]:
    return [] if value is None else [name, value]
