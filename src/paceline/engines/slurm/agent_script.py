"""The batch script of agents: an array of jobs of one node each, so that each starts when a node is free and
is lost alone. Pure: text from settings.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Final

from paceline.engines.engine import AgentSpec
from paceline.engines.slurm import directives

# Of a run that is handed over as one job; an agent is one task on one node, and a job of its own.
_SIZE_OF_A_RUN: Final = ("nodes", "ntasks", "ntasks-per-node")


def agent_options(
    agents: AgentSpec, settings: Mapping[str, str], options: Mapping[str, str]
) -> dict[str, str]:
    """Return the options of sbatch; `settings` are partition and time, where they are set."""
    table = {"job-name": agents.run, "nodes": "1", "ntasks": "1"}
    # A node for itself: `nodes=4` means four machines, and SLURM would put small jobs together on one.
    table["exclusive"] = ""
    table["cpus-per-task"] = str(agents.workers_per_node)
    if agents.gpus_per_node:
        table["gres"] = f"gpu:{agents.gpus_per_node}"
    # Another agent is asked for when this one is lost, so that SLURM need not start it again.
    table["no-requeue"] = ""
    given = {name: value for name, value in options.items() if name not in _SIZE_OF_A_RUN}
    return directives.merged({**table, **settings}, given)


def options_in(agents: AgentSpec, folder: str, table: Mapping[str, str]) -> dict[str, str]:
    """Return the options with those of the places where agents run and write: `folder` gets their output."""
    where = {"output": f"{folder}/agent-%A_%a.log", "open-mode": "append"}
    if agents.folder:
        where["chdir"] = agents.folder
    return {**table, **where}


def agent_script(agents: AgentSpec, folder: str, table: Mapping[str, str]) -> str:
    """Return the script; `folder` holds the token."""
    lines = ["#!/bin/bash", *directives.lines(table), ""]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in agents.environment.items()]
    # In the shell's place: a signal to the job reaches the agent.
    lines += [f"exec {agents.shell_command(f'{folder}/token')}", ""]
    return "\n".join(lines)
