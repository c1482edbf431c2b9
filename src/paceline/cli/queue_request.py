"""What `paceline queue add` asks for, checked before it waits: a mistake must not show itself hours later."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import typer

from paceline.cli.setting_checks import check_script, check_settings
from paceline.core.errors import UsageError
from paceline.frontends.run_queue.queue_client import check_unit, kept_environment
from paceline.frontends.run_queue.queued_run import RunRequest

_SIZE: Final = re.compile(r"(\d+)(?:-(\d+))?")
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
# Options and settings of `paceline train` that the queue gives itself, and what to use.
_OURS: Final = {
    "workers": "--workers MIN-MAX",
    "num_gpus": "--workers MIN-MAX",
    "num_nodes": "--workers MIN-MAX",
    "nodes": "--workers MIN-MAX, in multiples of --workers-per-node",
    "min_workers": "--workers MIN-MAX",
    "fault_tolerance.min_workers": "--workers MIN-MAX",
    "fault_tolerance.max_workers": "--workers MIN-MAX",
    "run_dir": "--run-dir of `paceline queue add`",
    "dry_run": "paceline train --dry-run, without the queue",
    "resume": "nothing: a run in the queue always continues from what it saved",
}


def new_request(
    words: Sequence[str], arguments: tuple[str, ...], workers: str | None, capacity: int, env: Sequence[str]
) -> RunRequest:
    """Return the request of these words, without a name and a folder; UsageError where `paceline train`
    would refuse them. Without `workers` the run may use all of the `capacity`."""
    given = _parsed(words, arguments)
    script = given["script"] if given["script_file"] is None else given["script_file"]
    if script is None:
        raise UsageError(
            "no script is given", remedy="name the file that trains: paceline queue add train.py"
        )
    check_script(script)
    _check(given)
    per_node = _workers_per_node(given)
    unit = per_node or 1
    least, most = (unit, max(unit, capacity // unit * unit)) if workers is None else parse_size(workers)
    check_unit(least, most, per_node)
    return RunRequest(
        script=script,
        options=tuple(words),
        arguments=arguments,
        folder=os.getcwd(),
        python=sys.executable,
        environment=kept_environment(env, has_engine=per_node > 0),
        run_dir="",
        name="",
        least=least,
        most=most,
        per_node=per_node,
    )


def run_name(given: str | None, script: str) -> str:
    """Return the name of a run: the given one, else the script's."""
    name = Path(script).stem if given is None else given
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r} cannot be part of a folder's name", remedy="use letters, digits, '.', '-', '_'"
        )
    return name


def parse_size(text: str) -> tuple[int, int]:
    """Return the fewest and the most workers of a text such as 1-4 or 4."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(
            f"--workers {text} is no number of workers",
            remedy="give the fewest and the most, such as 1-4, or one number",
        )
    least = int(match[1])
    return least, int(match[2]) if match[2] is not None else least


def _parsed(words: Sequence[str], arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the parameters of `paceline train` that these words are."""
    from paceline.cli.train import train

    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command("train")(train)
    with typer.main.get_command(alone).make_context("paceline train", [*words, "--", *arguments]) as context:
        return dict(context.params)


def _workers_per_node(given: dict[str, Any]) -> int:
    """Return the workers of a node of the engine that is asked for; 0: the run stays on this machine."""
    from paceline.cli.engine_options import EngineOptions

    engine = EngineOptions(
        engine=given["engine"] or ("ray" if _backend(given) == "ray" else None),
        workers_per_node=given["workers_per_node"],
        gpus_per_node=given["gpus_per_node"] if given["engine"] else None,
        address=given["address"] if given["engine"] or _backend(given) == "ray" else None,
        image=given["image"],
        settings=given["engine_settings"] or [],
        slurm=given["slurm"] or [],
    ).chosen()
    return 0 if engine is None else engine.workers_per_node


def _backend(given: dict[str, Any]) -> str | None:
    """Return the backend of the options, else that of a file of DistributedConfig."""
    from paceline.frontends.ddp_trainer.config_file import PerGpuFile

    if given["backend"] is not None or given["config"] is None:
        return None if given["backend"] is None else str(given["backend"])
    found = PerGpuFile.read(given["config"])
    return None if found is None else found.config.backend


def _check(given: dict[str, Any]) -> None:
    from paceline.cli.train_layout import number_of_workers
    from paceline.core.chaos_spec import Chaos

    texts = check_settings(given["assignments"] or [], given["config"])
    assigned = {text.partition("=")[0].strip() for text in texts}
    for name, instead in _OURS.items():
        is_option = given.get(name) not in (None, False)
        option = f"--{name.replace('_', '-')}" if is_option else f"--set {name}"
        if is_option or name in assigned:
            raise UsageError(f"{option}: the queue decides about it", remedy=f"use {instead}")
    if given["engine"] is None and _backend(given) != "ray":
        number_of_workers(None, None, None, given["gpus_per_node"], given["address"], given["backend"])
    if given["chaos"] is not None:
        Chaos(given["chaos"])
