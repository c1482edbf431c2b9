"""An engine whose nodes are processes of this machine: the reference for the contract of engines, and a way
to try a run on several nodes without any.

    TrainConfig(engine=ProcessEngine(nodes=2, workers_per_node=2))

Each agent has a host name of its own, so its workers talk to those of others over the network.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from paceline.engines.agent_commands import AgentCommands, CommandEnd, watched_command
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest


@final
@dataclass(frozen=True, kw_only=True)
class ProcessEngine:
    """`most` nodes can be had; those beyond `nodes` replace lost ones. `address`: where the supervisor
    listens for them."""

    name: Literal["process"] = "process"
    nodes: int = 1
    workers_per_node: int = 1
    most: int = 8
    address: str = "127.0.0.1"

    def check(self) -> None:
        """Nothing is needed."""

    def address_for_nodes(self) -> str:
        return self.address

    def request(self, agents: AgentSpec) -> EngineRequest:
        command = watched_command(agents, sys.executable)
        hosts = [f"node{number}" for number in range(max(self.most, agents.nodes))]
        return {
            "nodes": agents.nodes,
            "commands": [
                {"host": host, "command": ["env", f"PACELINE_HOST={host}", *command]} for host in hosts
            ],
        }

    def submit(self, request: EngineRequest, secret: bytes) -> EngineJob:
        return AgentCommands(request, secret, _explain)


def _explain(host: str, code: int, lines: Sequence[str], ran: bool) -> CommandEnd:
    return CommandEnd("ended", f"exit code {code}")
