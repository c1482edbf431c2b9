"""The batch script of a run that is handed over: the supervisor is a step on the first node of the allocation
and starts an agent on each node. Pure: text from settings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Final

from paceline.engines.batch import BatchSpec
from paceline.engines.slurm import directives

_LEAVE_SECONDS: Final = 60  # before the time limit, to save
_HEAD: Final = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
_STEP: Final = "python -m paceline.engines.slurm.requeue_on_signal"


def log_name(name: str, is_array: bool) -> str:
    """Return the name of the file with the run's output."""
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
    # Steps get the signal: the supervisor is one. With B: only the batch shell would.
    if "signal" in merged:
        merged["signal"] = re.sub(r"^[BR]{1,2}:", "", merged["signal"])
    return merged


def batch_script(job: BatchSpec, table: Mapping[str, str]) -> str:
    """Return the script."""
    lines = ["#!/bin/bash", *directives.lines(table), ""]
    if job.folder:
        lines += [f"cd {shlex.quote(job.folder)} || exit 1"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    train = ["-m", "paceline", "train", job.script, "--engine", "slurm"]
    train += ["--nodes", "$SLURM_JOB_NUM_NODES", "--workers-per-node", str(job.workers_per_node)]
    if job.gpus_per_node:
        train += ["--gpus-per-node", str(job.gpus_per_node)]
    given = {option.partition("=")[0] for option in job.options}
    if "--run-dir" not in given:
        # The same after a requeue: the run goes on where it was.
        number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if "array" in table else "$SLURM_JOB_ID"
        train += ["--run-dir", f"runs/{job.name}-{number}"]
    if "--resume" not in given:
        train += ["--resume", "auto"]
    train += [*job.options, *(["--", *job.arguments] if job.arguments else [])]
    shown = [part if part.startswith(("$", "runs/")) and "$" in part else shlex.quote(part) for part in train]
    python = shlex.quote(job.python)
    lines += [
        "# The supervisor runs on the first node. A step, because SLURM sends SIGTERM to steps: before the",
        "# time limit and before a preemption the run saves and leaves, is requeued, and goes on from there.",
        f"head={_HEAD}",
        'exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" --job-name=paceline-supervisor \\',
        "  --unbuffered --input=none --no-kill \\",
        f"  {python} -m paceline.engines.slurm.requeue_on_signal {python} {_line(shown)}",
        "",
    ]
    return "\n".join(lines)


def _line(parts: list[str]) -> str:
    return " ".join(f'"{part}"' if "$" in part else part for part in parts)
