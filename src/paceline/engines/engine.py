"""What an engine is: the place where agents (`paceline join`) run. Supervisor, agents and workers are the
same everywhere; an engine starts one agent per node, says what became of it, and hands its output back.

    request = engine.request(AgentSpec(...))     plain data, what `--dry-run` prints; nothing has happened yet
    job = engine.submit(request, secret)         the agents are asked for
    job.poll(), job.scale(4), job.logs(), job.stop()

An engine decides nothing about training: a lost agent is noticed by the supervisor, and `AgentFleet`
(agent_fleet.py) asks for another one with `scale`. The request never holds the job's secret: it is printed,
logged and golden-tested. `submit` gets the secret beside it and hands it on by a file that only its owner can
read, or by the engine's own store for secrets; never on a command line, never in an environment variable that
the engine shows.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, final, runtime_checkable

from paceline.core.engine_registry import EngineSettings

EngineRequest: TypeAlias = Mapping[str, Any]
"""A request as plain data: str, int, float, bool, None, lists and dicts with text keys."""

STAY_SECONDS: Final = 20.0
"""For how long an agent has to run for its end to be a loss, and not a failed start."""

NodeState: TypeAlias = Literal["pending", "running", "ended", "lost"]
"""`pending`: asked for, no agent runs yet; `ended`: the agent's process is over, and its exit code is known;
`lost`: the node, or the engine's own process on it, is gone."""


@final
@dataclass(frozen=True, kw_only=True)
class AgentSpec:
    """The agents that a run needs. `address` is where nodes reach the supervisor; `folder` is the script's
    working directory; `environment` is added to the agents' own."""

    run: str
    address: tuple[str, int]
    nodes: int
    workers_per_node: int
    gpus_per_node: int = 0
    ports: str = ""
    interface: str = ""
    certificate: str = ""
    key: str = ""
    authority: str = ""
    folder: str = ""
    python: str = "python3"
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, token: str, python: str = "") -> list[str]:
        """Return the agent's command line; `token` is the file that holds the secret on its node."""
        host, port = self.address
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        command = [python or self.python, "-m", "paceline", "join", where, "--token-file", token]
        command += ["--workers", str(self.workers_per_node)]
        for option in ("ports", "interface", "certificate", "key", "authority"):
            if value := getattr(self, option):
                command += [f"--{option}", value]
        return command

    def shell_command(self, token: str, python: str = "") -> str:
        """Return the agent's command line for a shell."""
        return shlex.join(self.command(token, python))


def gpus_per_node(engine: EngineSettings) -> int:
    """Return the GPUs of each node; 0 for an engine that has no such setting."""
    return int(getattr(engine, "gpus_per_node", 0))


def named_hosts(engine: EngineSettings) -> int:
    """Return the number of hosts that the settings name, spare ones included; 0 where the engine chooses."""
    lines = getattr(engine, "host_lines", None)
    return len(lines()) if lines is not None else 0


def most_nodes(engine: EngineSettings, nodes: int) -> int:
    """Return how many nodes a run asks for until a person asks for another number: beyond its own `nodes`,
    those that the engine may add."""
    return max(nodes, getattr(engine, "max_nodes", None) or 0)


@final
@dataclass(frozen=True)
class NodeStatus:
    """What became of one agent. `node` counts the agents of a job from 0 and is never used twice; `host` is
    the engine's name of the machine, empty while there is none; `reason` is its own word for an end, or for
    a wait; `remedy`: what to do about it, where the engine knows."""

    node: int
    state: NodeState
    host: str = ""
    code: int | None = None
    reason: str = ""
    remedy: str = ""


@final
@dataclass(frozen=True)
class LogLine:
    """One line that an agent wrote, or a worker through it."""

    node: int
    text: str


class EngineJob(Protocol):
    """Agents that were asked for. All methods return at once or within seconds; one thread calls them.
    UnavailableError and CommTimeoutError say that the engine could not answer now, and may at the next call;
    any other error is final where no agent runs."""

    def poll(self) -> Sequence[NodeStatus]:
        """Return every agent that was asked for, also those that are over."""
        ...

    def scale(self, nodes: int) -> None:
        """Have this many agents pending or running: ask for those that are missing, replacing ended and lost
        ones; or end the newest ones where there are too many (SIGTERM: they leave at a step boundary). Raise
        where the engine refuses them, or none can come."""
        ...

    def logs(self) -> Iterable[LogLine]:
        """Return what the agents wrote since the last call."""
        ...

    def stop(self) -> None:
        """End all agents and remove everything that `submit` made. May be called twice."""
        ...


@runtime_checkable
class Engine(EngineSettings, Protocol):
    """One way to start agents on nodes: the settings that a user writes, `TrainConfig(engine=...)`. Imports
    what it needs in its methods: settings are made where no engine is installed."""

    def check(self) -> None:
        """Raise UnavailableError or UsageError, with the remedy, where this engine cannot be used from here:
        nothing is installed, no head answers, no such partition."""
        ...

    def address_for_nodes(self) -> str:
        """Return the address of this machine that nodes can reach, for the supervisor to listen at;
        UsageError with the remedy where only a loopback address is found and nodes are other machines."""
        ...

    def request(self, agents: AgentSpec) -> EngineRequest:
        """Return what `submit` would ask for."""
        ...

    def submit(self, request: EngineRequest, secret: bytes) -> EngineJob:
        """Ask for the agents. What was begun is undone where this raises."""
        ...
