"""The SLURM engine.

    TrainConfig(engine=paceline.Slurm(nodes=4, workers_per_node=2, partition="gpu", time="2:00:00"))
    paceline train script.py --engine slurm --nodes 4 --workers-per-node 2 --slurm partition=gpu

On a login node each agent is a job of one node, so that training begins with the first that SLURM starts, and
a lost node is one job. Inside an allocation (salloc, sbatch, srun) agents are steps on its nodes.
`paceline submit --engine slurm` hands the whole run over as a batch script.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, final

from paceline.core import config as core_config
from paceline.core.errors import ConfigError, UsageError
from paceline.core.reachable_address import address_for_hosts, is_known, own_address
from paceline.engines.agent_commands import AgentCommands
from paceline.engines.batch import BatchSpec, BatchStatus, NewLines, new_lines
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest
from paceline.engines.slurm import batch_jobs, directives, slurm_commands as commands
from paceline.engines.slurm.agent_script import agent_options, agent_script, options_in
from paceline.engines.slurm.allocation import Allocation
from paceline.engines.slurm.batch_script import batch_options, batch_script
from paceline.engines.slurm.job_agents import JobAgents, end_abandoned
from paceline.engines.slurm.shared_folder import SharedFolder, folder_for
from paceline.engines.slurm.step_command import explain_step, step_command
from paceline.engines.slurm.task_history import TaskHistory

_NOTHING: Final = "#!/bin/bash\ntrue\n"


def _check(key: str, value: object, kind: type[float]) -> None:
    known = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, known) or value < 0:
        raise ConfigError(
            f"{key}={value!r} cannot be",
            remedy=f"give a {'whole ' if kind is int else ''}number, 0 or more",
            key=key,
        )


@final
@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Settings of the SLURM engine.

    nodes             agents to begin with; 0: `nodes` of the options, else every node of the allocation that
                      this process runs in, else 1
    workers_per_node  workers of each; 0: the tasks per node of the allocation, else the GPUs, else 1
    gpus_per_node     GPUs of each node (--gres=gpu:N)
    partition, time   as sbatch takes them; empty: the cluster's own
    options           further options of sbatch: {"qos": "high", "exclude": "n7"}; "" is an option without a
                      value, "no" leaves one out that Paceline would give, e.g. {"exclusive": "no"}
    folder            folder on a file system that all nodes share, for the token and the output of agents;
                      empty: the working directory
    interface         interface or address of this machine at which nodes reach the supervisor
    poll_seconds      between two looks at the queue
    """

    name: Literal["slurm"] = "slurm"
    nodes: int = 0
    workers_per_node: int = 0
    gpus_per_node: int = 0
    partition: str = ""
    time: str = ""
    options: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    interface: str = ""
    poll_seconds: float = 2.0

    def __post_init__(self) -> None:
        for key in ("nodes", "workers_per_node", "gpus_per_node"):
            _check(key, getattr(self, key), int)
        _check("poll_seconds", self.poll_seconds, float)
        for key in ("partition", "time"):
            if not isinstance(value := getattr(self, key), str):
                raise ConfigError(f"{key}={value!r} is not text", remedy=f'write {key}="{value}"', key=key)
        directives.check_options({**self.options, "partition": self.partition, "time": self.time})
        allocation = Allocation.from_environment()
        if not self.nodes:
            in_allocation = allocation.node_count if allocation else 1
            object.__setattr__(self, "nodes", directives.least_nodes(self.options) or in_allocation)
        directives.check_nodes(self.options, self.nodes)
        if not self.workers_per_node:
            tasks = allocation.tasks_per_node if allocation and allocation.tasks_per_node > 1 else 0
            object.__setattr__(self, "workers_per_node", tasks or self.gpus_per_node or 1)

    @property
    def _settings(self) -> dict[str, str]:
        given = {"partition": self.partition, "time": self.time}
        return {key: value for key, value in given.items() if value}

    def check(self) -> None:
        allocation = Allocation.from_environment()
        if allocation is None:
            spec = AgentSpec(
                run="paceline", address=("", 0), nodes=self.nodes, workers_per_node=self.workers_per_node,
                gpus_per_node=self.gpus_per_node,
            )  # fmt: skip
            self._test(agent_options(spec, self._settings, self.options))
            return
        hosts = commands.expand(allocation.nodes)
        if self.nodes > len(hosts):
            raise UsageError(
                f"{self.nodes} nodes are asked for, and the allocation {allocation.job} has {len(hosts)}",
                remedy="ask for fewer nodes, or for a larger allocation (--nodes of salloc or sbatch)",
            )

    def _test(self, table: dict[str, str]) -> None:
        """Have SLURM judge the request, and queue nothing."""
        command = ["sbatch", "--test-only", "--output=/dev/null", *directives.arguments(table)]
        commands.call(command, stdin=_NOTHING, options=table)

    def address_for_nodes(self) -> str:
        self.check()  # before anything is started: this is what a run asks first
        allocation = Allocation.from_environment()
        command = ["sinfo", "--noheader", "--Node", "--format=%o"]
        if allocation is not None:
            command.append(f"--nodes={allocation.nodes}")
        elif partition := self._partition():
            command.append(f"--partition={partition}")
        addresses = sorted(set(commands.call(command).split()))
        if not addresses:
            raise UsageError("the partition has no nodes", remedy="choose one that has: `sinfo`")
        # A node that is down, or is started on demand, may have no address yet.
        known = [address for address in addresses if is_known(address)]
        if not known and not self.interface:
            return own_address()
        return address_for_hosts(known or addresses, interface=self.interface)

    def _partition(self) -> str:
        """Return the partition that sbatch would take; empty where the cluster has no default."""
        given = directives.merged({"partition": self.partition}, self.options).get("partition")
        return given or os.environ.get("SBATCH_PARTITION") or commands.default_partition()

    def request(self, agents: AgentSpec) -> EngineRequest:
        plain = {"engine": self.name, "run": agents.run, "nodes": agents.nodes}
        allocation = Allocation.from_environment()
        if allocation is not None:
            hosts = commands.expand(allocation.nodes)
            steps = [
                step_command(agents, allocation.job, host, allocation.cpus_of(index), agents.run)
                for index, host in enumerate(hosts)
            ]
            pairs = zip(hosts, steps, strict=True)
            return {**plain, "commands": [{"host": host, "command": step} for host, step in pairs]}
        folder = folder_for(self.folder or agents.folder or os.getcwd(), agents.run, agents.address)
        table = options_in(agents, folder, agent_options(agents, self._settings, self.options))
        return {**plain, "folder": folder, "options": table, "script": agent_script(agents, folder, table)}

    def submit(self, request: EngineRequest, secret: bytes) -> EngineJob:
        self.check()
        if "commands" in request:
            return AgentCommands(request, secret, explain_step)
        end_abandoned(Path(request["folder"]).parent)
        folder = SharedFolder(request["folder"], secret)
        return JobAgents(request["script"], request["options"], folder, request["nodes"], self.poll_seconds)

    # a run that is handed over

    def check_batch(self) -> None:
        commands.call(["sbatch", "--version"])  # `submit_batch` has SLURM judge the job itself

    def _batch(self, job: BatchSpec) -> tuple[dict[str, str], str]:
        """Return the options of the job, and its script."""
        table = batch_options(job, self._settings, self.options)
        # The others are about agents that are jobs of their own; here agents are steps.
        interface = core_config.assignments(Slurm, {"interface": self.interface}) if self.interface else ()
        return table, batch_script(job, table, interface)

    def batch_text(self, job: BatchSpec) -> str:
        return self._batch(job)[1]

    def submit_batch(self, job: BatchSpec) -> str:
        table, script = self._batch(job)
        self._test(table)
        return batch_jobs.submit(script, job.folder or os.getcwd(), table)

    @cached_property
    def _history(self) -> TaskHistory:
        return TaskHistory()

    def batch_status(self, identifier: str) -> BatchStatus:
        return self._history.status(identifier)

    def batch_logs(self, identifier: str) -> NewLines:
        return new_lines(batch_jobs.log_reader(identifier))

    def stop_batch(self, identifier: str) -> None:
        batch_jobs.stop(identifier)
