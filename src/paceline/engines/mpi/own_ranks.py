"""The ranks of the mpirun in which this process runs, as nodes of a run: one calls for agents, the others are
agents until the run is over.

How the ranks find each other is frontends/mpi_calls.py's work, which sets `current`; here they are an
EngineJob. The agent of the rank that calls is a process of its own, on the processors of that rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol, final

from paceline.engines.agent_commands import AgentCommands, CommandEnd, last_words, watched_command
from paceline.engines.engine import AgentSpec, EngineRequest, LogLine, NodeStatus


class OwnRanks(Protocol):
    """The other ranks of this process's mpirun, while they wait for what rank 0 does."""

    @property
    def world_size(self) -> int: ...

    def address(self) -> str:
        """Return the address at which the other ranks reach this one."""
        ...

    def call_agents(self, address: tuple[str, int], secret: bytes) -> None:
        """Have the other ranks be agents of the supervisor at an address."""
        ...

    def statuses(self) -> Sequence[NodeStatus]:
        """Return what became of the agents of the ranks other than 0."""
        ...


_current: Final[list[OwnRanks]] = []


def current() -> OwnRanks | None:
    """Return the ranks that wait for this process; None outside of a call that they make together."""
    return _current[-1] if _current else None


@contextlib.contextmanager
def waiting(ranks: OwnRanks) -> Iterator[None]:
    """Offer the ranks to the engine while they wait."""
    _current.append(ranks)
    try:
        yield
    finally:
        _current.remove(ranks)


def request(agents: AgentSpec) -> EngineRequest:
    """Return what `RankJob` asks for."""
    own = {"host": "rank 0", "command": watched_command(agents, sys.executable)}
    return {
        "engine": "mpi",
        "run": agents.run,
        "ranks": agents.nodes,
        "address": list(agents.address),
        "nodes": 1,
        "commands": [own],
    }


@final
class RankJob:
    """The agents of all ranks. A rank that is lost stays lost: mpirun starts no other in its place."""

    def __init__(self, request: EngineRequest, secret: bytes, ranks: OwnRanks) -> None:
        self._ranks, self._count = ranks, int(request["ranks"])
        self._own = AgentCommands(request, secret, _explain)
        host, port = request["address"]
        try:
            ranks.call_agents((host, port), secret)
        except BaseException:
            self._own.stop()
            raise

    def poll(self) -> Sequence[NodeStatus]:
        own = [dataclasses.replace(status, node=self._number(status.node)) for status in self._own.poll()]
        return [*own, *self._ranks.statuses()]

    def scale(self, nodes: int) -> None:
        """Have the agent of rank 0 run; the other ranks are as many as mpirun has started."""
        self._own.scale(1)

    def logs(self) -> Iterable[LogLine]:
        """Return what rank 0's agent wrote; mpirun shows what the others write."""
        lines = self._own.logs()
        return [LogLine(self._number(line.node), line.text) for line in lines]

    def stop(self) -> None:
        """End the agent of rank 0; the others end with the run, which ends before this is called."""
        self._own.stop()

    def _number(self, attempt: int) -> int:
        """Return the node of rank 0's agent: 0, and beyond the ranks where it was started again."""
        return 0 if attempt == 0 else self._count + attempt - 1


def _explain(host: str, code: int, lines: Sequence[str], was_running: bool) -> CommandEnd:
    if code == 0 and was_running:
        return CommandEnd("ended", lines[-1] if lines else "")
    # What keeps an agent from starting on this machine, where Python runs, may pass.
    return CommandEnd("ended", f"the agent of {host} ended with code {code}{last_words(lines)}")


def encode_call(address: tuple[str, int], secret: bytes, folder: str) -> bytes:
    """Return how the call for agents travels to the other ranks, over an authenticated connection."""
    plain = {"host": address[0], "port": address[1], "secret": secret.hex(), "folder": folder}
    return json.dumps(plain).encode()


def decode_call(data: bytes) -> tuple[tuple[str, int], bytes, str]:
    """Return the supervisor's address, the job's secret and the folder of the run."""
    plain = json.loads(data)
    return (str(plain["host"]), int(plain["port"])), bytes.fromhex(plain["secret"]), str(plain["folder"])
