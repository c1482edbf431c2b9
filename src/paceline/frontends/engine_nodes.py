"""The nodes of a run on an engine, on the side of its caller: agents are asked for once the supervisor
listens, and ended with the run. Must not import torch."""

from __future__ import annotations

import ipaddress
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from paceline.control import supervisor_address
from paceline.core.errors import PacelineError, UsageError
from paceline.core.listen_address import ALL_ADDRESSES, ListenAddress, is_loopback, resolves_to_loopback
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
    it. UsageError where the settings name a loopback address and nodes are other machines."""
    care, engine = config.fault_tolerance, config.engine
    if not isinstance(engine, Engine):
        return care.bind
    if care.bind == _DEFAULT_BIND and not care.interface:
        return engine.address_for_nodes()
    own = ListenAddress(interface=care.interface or "").address(care.bind)
    if (is_loopback(own) or resolves_to_loopback(own)) and not is_loopback(engine.address_for_nodes()):
        name = "interface" if care.interface else "bind"
        raise UsageError(
            f"{name}={getattr(care, name)!r} is the loopback address {own}: no node of {engine.name} reaches "
            "the supervisor there",
            remedy=f"leave fault_tolerance.{name} out, or give the interface or the address that nodes reach "
            "(`ip address` lists them)",
        )
    return care.bind


def agent_spec(config: TrainConfig, address: tuple[str, int]) -> AgentSpec:
    """Return the agents that a run needs, for a supervisor that listens at `address`."""
    engine, care = config.engine, config.fault_tolerance
    assert isinstance(engine, Engine)
    host = address[0]
    if care.bind in ALL_ADDRESSES and not care.interface:
        # It listens at all addresses, and names the one by which this machine reaches it.
        host = engine.address_for_nodes()
    return AgentSpec(
        run=config.name,
        address=(host, address[1]),
        nodes=engine.nodes,
        workers_per_node=engine.workers_per_node,
        gpus_per_node=gpus_per_node(engine),
        ports=care.ports or "",
        interface=_interface_of_nodes(care.interface or ""),
        certificate=care.certificate or "",
        key=care.key or "",
        authority=care.authority or "",
        folder=os.getcwd(),
        python=sys.executable,
    )


def _interface_of_nodes(interface: str) -> str:
    """Return the interface at which workers on nodes listen: a name may be that of an interface of every
    machine, and an address belongs to the supervisor's alone."""
    try:
        ipaddress.ip_address(interface)
    except ValueError:
        return interface
    return ""


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
            _log.warning("%s", unsure_end(self._engine.name, error))


def unsure_end(engine: str, error: Exception) -> str:
    """Return what is said of agents whose end failed: what is left, by its name, and how it is removed."""
    what, remedy = f"{type(error).__name__}: {error}", "see what still runs there"
    if isinstance(error, PacelineError):
        what, remedy = error.message, f"try: {error.remedy}" if error.remedy else remedy
    told = "; ".join([what, *getattr(error, "__notes__", ()), remedy])
    return f"whether the agents on {engine} have ended is not known: {told}"


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
