"""The ssh engine: one agent per host, over a connection that lives as long as the agent.

    TrainConfig(engine=paceline.Ssh(hosts=("node1", "node2"), workers_per_node=2))
    paceline train script.py --engine ssh --engine-set host_file=hosts --nodes 2 --workers-per-node 2

Hosts beyond `nodes` are spare: they take the place of hosts that are lost. Paceline of the same version has
to be installed on every host, and ssh has to get in without asking (a key, an agent). Nothing is copied.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, final

from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.core.reachable_address import address_for_hosts
from paceline.engines.agent_commands import AgentCommands, watched_command
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest
from paceline.engines.host_file import HostLine, check_room, parse_hosts, read_host_file
from paceline.engines.ssh.ssh_errors import NO_FOLDER_CODE, explain_end

_CONNECT_SECONDS: Final = 10
_ALIVE_SECONDS: Final = 5
_ALIVE_COUNT: Final = 3
_CONFIGURATION_SECONDS: Final = 10.0


@final
@dataclass(frozen=True, kw_only=True)
class Ssh:
    """Settings of the ssh engine.

    hosts             [user@]host[:port] of each; or `host_file`, with one per line
    nodes             agents to begin with; 0: one on every host, none is spare
    user, port        for hosts that name none; empty: those of the ssh configuration
    identity          file of the private key; empty: those of the ssh configuration
    options           further options of ssh, e.g. ("ProxyJump=bastion",)
    python            Python with Paceline on the hosts; empty: the path of this one
    folder            working directory on the hosts; empty: that of the run
    interface         interface or address of this machine at which hosts reach the supervisor
    """

    name: Literal["ssh"] = "ssh"
    hosts: tuple[str, ...] = ()
    host_file: str = ""
    nodes: int = 0
    workers_per_node: int = 1
    user: str = ""
    port: int = 0
    identity: str = ""
    options: tuple[str, ...] = ()
    python: str = ""
    folder: str = ""
    interface: str = ""

    def __post_init__(self) -> None:
        if bool(self.hosts) == bool(self.host_file):
            raise ConfigError(
                "the ssh engine needs hosts= or host_file=, and not both",
                remedy='write Ssh(hosts=("node1", "node2")) or Ssh(host_file="hosts"); on the command line '
                "--engine-set hosts=node1,node2 or --engine-set host_file=hosts",
                key="hosts",
            )
        if self.nodes < 0 or self.workers_per_node < 1 or not 0 <= self.port < 65536:
            raise ConfigError(
                f"nodes={self.nodes}, workers_per_node={self.workers_per_node}, port={self.port} cannot be",
                remedy="give nodes=0 or more, workers_per_node=1 or more, and a port below 65536",
                key="nodes",
            )
        if self.nodes == 0:
            object.__setattr__(self, "nodes", len(self.host_lines()))

    def host_lines(self) -> tuple[HostLine, ...]:
        """Return the hosts, spare ones included."""
        return read_host_file(Path(self.host_file)) if self.host_file else parse_hosts(self.hosts, "hosts=")

    def check(self) -> None:
        if shutil.which("ssh") is None:
            raise UnavailableError(
                "the ssh engine needs the program ssh, and it is not on PATH",
                remedy="install it (Debian: apt install openssh-client)",
            )
        check_room(self.host_lines(), self.nodes, self.workers_per_node)
        if self.identity and not Path(self.identity).expanduser().is_file():
            raise UsageError(
                f"there is no private key {self.identity}", remedy="give the path of the key: identity="
            )

    def address_for_nodes(self) -> str:
        return address_for_hosts(
            [_real_name(self._destination(line)) for line in self.host_lines()], interface=self.interface
        )

    def request(self, agents: AgentSpec) -> EngineRequest:
        commands = [
            {
                "host": line.shown,
                "command": [*self._destination(line), _remote_command(agents, self.python, self.folder)],
            }
            for line in self.host_lines()
        ]
        return {
            "engine": self.name,
            "run": agents.run,
            "nodes": agents.nodes,
            "python": self.python or agents.python,
            "folder": self.folder or agents.folder,
            "commands": commands,
        }

    def submit(self, request: EngineRequest, secret: bytes) -> EngineJob:
        explain = partial(explain_end, python=request["python"], folder=request["folder"])
        return AgentCommands(request, secret, explain)

    def _destination(self, line: HostLine) -> list[str]:
        """Return ssh's command line up to the host's name."""
        settings: dict[str, Any] = {
            "BatchMode": "yes",  # a question would wait for ever
            "ConnectTimeout": _CONNECT_SECONDS,
            "ServerAliveInterval": _ALIVE_SECONDS,
            "ServerAliveCountMax": _ALIVE_COUNT,
            "ControlPath": "none",  # an own connection, which ends with this agent alone
            "LogLevel": "ERROR",
        }
        command = ["ssh", "-T", "-x", "-a"]
        # ssh takes the first value that it sees of a setting: a caller's comes before these.
        for text in (*self.options, *(f"{key}={value}" for key, value in settings.items())):
            command += ["-o", text]
        if self.identity:
            command += ["-i", str(Path(self.identity).expanduser()), "-o", "IdentitiesOnly=yes"]
        if user := line.user or self.user:
            command += ["-l", user]
        if port := line.port or self.port:
            command += ["-p", str(port)]
        return [*command, line.host]


def _remote_command(agents: AgentSpec, python: str, folder: str) -> str:
    """Return what the login shell of a host runs; the secret comes through standard input."""
    python = python or agents.python
    words = watched_command(agents, python)
    if agents.environment:
        words = ["env", *(f"{key}={value}" for key, value in sorted(agents.environment.items())), *words]
    where = folder or agents.folder
    enter = f"cd {shlex.quote(where)} || exit {NO_FOLDER_CODE}; " if where else ""
    return f"{enter}exec {shlex.join(words)}"


def _real_name(destination: list[str]) -> str:
    """Return the name or address to which ssh would connect: a host may be an alias of its configuration."""
    try:
        done = subprocess.run(
            [destination[0], "-G", *destination[1:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=_CONFIGURATION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return destination[-1]  # `check` says what is wrong with ssh
    found = [line.split() for line in done.stdout.splitlines()]
    return next((words[1] for words in found if words[:1] == ["hostname"]), destination[-1])
