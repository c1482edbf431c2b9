"""The batch script of a run that is handed over: the supervisor runs on the first node of the allocation and
starts an agent on each node. Pure: text from settings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

from paceline.core.errors import ConfigError
from paceline.core.wording import listed
from paceline.engines.batch import BatchSpec
from paceline.engines.slurm import directives
from paceline.engines.slurm.requeue_on_signal import SIGNALS

_LEAVE_SECONDS: Final = 60  # before the time limit, to save


def log_name(name: str, is_array: bool) -> str:
    """Return the name of the file with the run's output. SLURM ends a job whose output would be in a folder
    that does not exist, and takes % and \\ for its own."""
    name = re.sub(r"[/%\\]+", "-", name)
    return f"{name}-%A_%a.log" if is_array else f"{name}-%j.log"


def batch_options(job: BatchSpec, settings: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of sbatch; `settings` are the engine's own partition and time."""
    table = {"job-name": job.name, "nodes": str(job.nodes), "ntasks-per-node": "1", "exclusive": ""}
    table["cpus-per-task"] = str(job.workers_per_node)
    if job.gpus_per_node:
        table["gres"] = f"gpu:{job.gpus_per_node}"
    table.update(settings)
    if job.time:
        table["time"] = job.time
    table["output"] = log_name(job.name, "array" in options)
    table["open-mode"] = "append"  # of all starts
    table["requeue"] = ""
    table["no-kill"] = ""  # a lost node takes its agent along, and not the job
    table["signal"] = f"TERM@{_LEAVE_SECONDS}"
    merged = directives.merged(table, options)
    # To the batch shell alone: a signal to the steps would end the agents under the run that saves.
    if "signal" in merged:
        merged["signal"] = f"B:{_checked_signal(merged['signal'])}"
    return merged


def _checked_signal(text: str) -> str:
    """Return the signal and the seconds of --signal; ConfigError for one that would end the batch shell, and
    the run with it."""
    signal = re.sub(r"^[BR]{1,2}:", "", text)
    name = signal.partition("@")[0].upper().removeprefix("SIG")
    known = {number.name.removeprefix("SIG"): str(int(number)) for number in SIGNALS}
    if name not in (*known, *known.values()):
        raise ConfigError(
            f"signal={text}: a run that is handed over does not save on {name or 'no signal'}",
            remedy=f"choose one of {listed([*known])}, like signal=USR1@300",
            key="options.signal",
        )
    return signal


def batch_script(job: BatchSpec, table: Mapping[str, str], further: Sequence[str] = ()) -> str:
    """Return the script. `further`: settings KEY=VALUE of the engine that `paceline train` has no option of
    its own for."""
    lines = ["#!/bin/bash", *directives.lines(table), ""]
    if job.folder:
        lines += [f"cd {shlex.quote(job.folder)} || exit 1"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    python = shlex.quote(job.python)
    lines += [
        "# The supervisor runs here, on the first node of the allocation, and starts an agent on each node.",
        "# Before the time limit and before a preemption it saves and leaves; the job is queued again.",
        f"exec {python} -m paceline.engines.slurm.requeue_on_signal \\",
        f"  {python} -m paceline train {_train_arguments(job, further, is_array='array' in table)}",
        "",
    ]
    return "\n".join(lines)


def _train_arguments(job: BatchSpec, further: Sequence[str], *, is_array: bool) -> str:
    """Return the arguments of `paceline train` for a shell."""
    words = [shlex.quote(job.script), "--engine slurm", '--nodes "$SLURM_JOB_NUM_NODES"']
    words += [f"--workers-per-node {job.workers_per_node}"]
    if job.gpus_per_node:
        words += [f"--gpus-per-node {job.gpus_per_node}"]
    words += [f"--engine-set {shlex.quote(text)}" for text in further]
    given = {option.partition("=")[0] for option in job.options}
    if "--run-dir" not in given:
        # The same after a requeue: the run goes on where it was.
        number = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if is_array else '"$SLURM_JOB_ID"'
        words += ["--run-dir " + shlex.quote(f"runs/{job.name}-") + number]
    if "--resume" not in given:
        words += ["--resume auto"]
    if job.options:
        words += [shlex.join(job.options)]
    if job.arguments:
        words += ["-- " + shlex.join(job.arguments)]
    return " ".join(words)
