"""Agents as steps of the allocation that this process runs in: the srun of each node, and why one ended."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from paceline.engines import remote_agent
from paceline.engines.agent_commands import CommandEnd, watched_command
from paceline.engines.engine import AgentSpec

# Of the job, and of the step that the caller may be in; srun would take its own options from them.
_UNSET: Final = (
    "SLURM_CPU_BIND",
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPUS_PER_TASK",
    "SLURM_DISTRIBUTION",
    "SLURM_EXPORT_ENV",
    "SLURM_GPUS",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_SOCKET",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GRES",
    "SLURM_HINT",
    "SLURM_MEM_PER_CPU",
    "SLURM_MEM_PER_GPU",
    "SLURM_MEM_PER_NODE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_STEP_GRES",
    "SLURM_TASKS_PER_NODE",
    "SLURM_THREADS_PER_CORE",
    "SLURM_TRES_PER_TASK",
)
SRUN: Final = (
    "env",
    *(word for name in _UNSET for word in ("-u", name)),
    "srun",
    "--overlap",
    "--nodes=1",
    "--ntasks=1",
)
_UNUSABLE: Final = (
    r"node configuration is not available|Invalid node name|not in the allocation",
    "it is not a node of the allocation any more",
)
_LOST: Final = (
    r"Communication connection failure|Unable to contact|timed out|Node failure|node fail|not responding|"
    r"Zero Bytes",
    "SLURM does not reach it",
)


def step_command(agents: AgentSpec, job: str, host: str, cpus: int, run: str) -> list[str]:
    """Return the srun that keeps an agent on a host; its standard input carries the secret."""
    command = [*SRUN, f"--jobid={job}", f"--nodelist={host}"]
    if cpus:
        command += [f"--cpus-per-task={cpus}"]
    command += [f"--job-name=agent-{run}", "--unbuffered", "--no-kill"]
    if agents.gpus_per_node:
        command += [f"--gres=gpu:{agents.gpus_per_node}"]
    if agents.folder:
        command += [f"--chdir={agents.folder}"]
    if agents.environment:
        command += ["env", *(f"{name}={value}" for name, value in sorted(agents.environment.items()))]
    return [*command, *watched_command(agents, agents.python)]


def explain_step(host: str, code: int, lines: Sequence[str], was_running: bool) -> CommandEnd:
    """Return why the agent on `host` ended; see agent_commands.ExplainEnd."""
    text = "\n".join(lines)
    quoted = f": {' | '.join(line.strip() for line in lines[-3:])}" if lines else ""
    if re.search(_UNUSABLE[0], text):
        return CommandEnd("lost", f"{host}: {_UNUSABLE[1]}", True)
    if re.search(_LOST[0], text):
        return CommandEnd("lost", f"{host}: {_LOST[1]}")
    if "Invalid generic resource" in text:
        # Of a job with --gpus=8: SLURM asks the node of a step that names none for all eight.
        remedy = "say with --gpus-per-node how many of the job's GPUs each node has"
        return CommandEnd("ended", f"{host}: SLURM has not the GPUs for its step{quoted}", True, remedy)
    if code == remote_agent.OTHER_VERSION_CODE:
        return CommandEnd("ended", f"{host}: it has another version of Paceline{quoted}", True)
    if not was_running and re.search(r"No module named '?paceline", text):
        return CommandEnd("ended", f"{host}: Python has no Paceline there{quoted}", True)
    if "CANCELLED" in text:
        return CommandEnd("ended", f"{host}: its step was cancelled")
    if code == 0:
        return CommandEnd("ended", lines[-1] if lines else "")
    if code > 128:
        return CommandEnd("ended", f"{host}: its agent was ended by signal {code - 128}")
    return CommandEnd("ended", f"{host}: its agent ended with code {code}{quoted}")
