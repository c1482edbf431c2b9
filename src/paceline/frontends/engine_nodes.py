"""The nodes of a run on an engine, on the side of its caller: agents are asked for once the supervisor
listens, and ended with the run. Must not import torch."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from paceline.control import supervisor_address
from paceline.core.errors import PacelineError
from paceline.core.listen_address import is_loopback
from paceline.engines.agent_fleet import AgentFleet
from paceline.engines.engine import AgentSpec, Engine, gpus_per_node
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.train_config import TrainConfig

if TYPE_CHECKING:
    from paceline.elastic.supervisor.parent_messages import JobOutcome
    from paceline.elastic.supervisor.supervisor_launcher import SupervisorLauncher

_DEFAULT_BIND: Final = FaultTolerance().bind
_log = logging.getLogger(__name__)


def supervisor_bind(config: TrainConfig) -> str:
    """Return where the supervisor listens: where the settings say so, else where the engine's nodes reach
    it."""
    care = config.fault_tolerance
    if not isinstance(config.engine, Engine):
        return care.bind
    if care.bind != _DEFAULT_BIND or care.interface:
        return care.bind
    return config.engine.address_for_nodes()


def agent_spec(config: TrainConfig, address: tuple[str, int]) -> AgentSpec:
    """Return the agents that a run needs, for a supervisor that listens at `address`."""
    engine, care = config.engine, config.fault_tolerance
    assert isinstance(engine, Engine)
    host = address[0]
    if is_loopback(host) and care.bind not in ("", _DEFAULT_BIND):
        # It listens at all addresses, and names the one by which this machine reaches it.
        host = engine.address_for_nodes()
    return AgentSpec(
        run=config.name,
        address=(host, address[1]),
        nodes=engine.nodes,
        workers_per_node=engine.workers_per_node,
        gpus_per_node=gpus_per_node(engine),
        ports=care.ports or "",
        certificate=care.certificate or "",
        key=care.key or "",
        authority=care.authority or "",
        folder=os.getcwd(),
        python=sys.executable,
    )


@final
class EngineNodes:
    """Agents of a run. Used by the thread that waits for it."""

    def __init__(self, config: TrainConfig, supervised: SupervisorLauncher, folder: Path) -> None:
        assert isinstance(config.engine, Engine)
        self._engine, self._supervised = config.engine, supervised
        self._wanted: int | None = None
        spec = agent_spec(config, supervised.address)
        self._fleet = AgentFleet(config.engine, spec, supervisor_address.read_secret(folder), _show)

    def start(self) -> None:
        """Ask the engine for agents."""
        self._fleet.start()

    def look(self, outcome: JobOutcome | None) -> None:
        """Carry out a change of size that a tool asked for; raise where no agent will come. With the run's
        `outcome` all agents end."""
        if outcome is not None:
            self.close()
            return
        wanted = self._supervised.wanted_agent_workers
        if wanted is not None and wanted != self._wanted:
            self._wanted = wanted
            self._fleet.scale(-(-wanted // self._engine.workers_per_node))
        if self._fleet.failure is not None:
            raise self._fleet.failure

    def close(self) -> None:
        """End the agents. Where the engine does not answer then, the run's result counts all the same."""
        try:
            self._fleet.close()
        except Exception as error:
            _log.warning(
                "whether the agents on %s have ended is not known: %s; see what still runs there",
                self._engine.name,
                error.message if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}",
            )


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
