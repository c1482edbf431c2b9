"""Where the supervisor of a run on an engine listens, and what the agents on nodes are told."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.train.small_run import fit, settings

import paceline
from paceline.core.errors import UsageError
from paceline.frontends.engine_nodes import agent_spec, supervisor_bind
from paceline.testing.engine_contract.run import Unhurried
from paceline.testing.process_engine import ProcessEngine
from paceline.train.callbacks import Observer
from paceline.train.history import StepRecord

OF_NODES = "10.9.9.9"
ELSEWHERE = ProcessEngine(nodes=2, address=OF_NODES)  # as if its nodes were other machines


def config(engine: ProcessEngine = ELSEWHERE, **care: Any) -> paceline.TrainConfig:
    return paceline.TrainConfig(engine=engine, fault_tolerance=paceline.FaultTolerance(**care))


def loopback_interface() -> str:
    """Return the name of the loopback interface."""
    return next(
        name for name, found in psutil.net_if_addrs().items() if "127.0.0.1" in (one.address for one in found)
    )


def test_the_supervisor_listens_where_nodes_reach_it_unless_told_otherwise():
    assert supervisor_bind(config()) == OF_NODES
    assert supervisor_bind(config(bind="10.1.1.1")) == "10.1.1.1"
    assert supervisor_bind(config(bind="0.0.0.0")) == "0.0.0.0"
    assert supervisor_bind(config(interface="10.1.1.1")) == "127.0.0.1"  # the interface comes before it


def test_ports_and_the_name_of_an_interface_are_those_of_agents_too():
    asked = config(ports="42000-42100", interface=loopback_interface())
    command = " ".join(agent_spec(asked, (OF_NODES, 41000)).command("token"))
    assert f"join {OF_NODES}:41000 " in command
    assert "--ports 42000-42100" in command
    assert f"--interface {loopback_interface()}" in command


def test_an_address_is_that_of_the_supervisor_alone():
    spec = agent_spec(config(interface="10.1.1.1"), ("10.1.1.1", 41000))
    assert (spec.address, spec.interface) == (("10.1.1.1", 41000), "")


@pytest.mark.parametrize(("bind", "own"), [("0.0.0.0", "127.0.0.1"), ("::", "::1")])
def test_agents_of_a_supervisor_that_listens_everywhere_get_the_address_for_nodes(bind, own):
    assert agent_spec(config(bind=bind), (own, 41000)).address == (OF_NODES, 41000)


def test_an_address_of_ipv6_is_in_brackets():
    assert "[fd00::5]:41000" in agent_spec(config(bind="fd00::5"), ("fd00::5", 41000)).command("token")


@pytest.mark.parametrize(
    "care",
    [{"bind": "localhost"}, {"bind": "127.0.0.2"}, {"bind": "::1"}, {"interface": loopback_interface()}],
)
def test_a_loopback_address_is_refused_where_nodes_are_other_machines(care):
    ((name, value),) = care.items()
    with pytest.raises(UsageError, match=f"{name}='{value}' is the loopback address") as refused:
        supervisor_bind(config(**care))
    assert f"leave fault_tolerance.{name} out" in refused.value.remedy
    here = dataclasses.replace(ELSEWHERE, address="127.0.0.1")
    assert supervisor_bind(config(here, **care)) == care.get("bind", "127.0.0.1")


class Listening(Observer):
    """Where the processes of a run listen, as the kernel has it. Steps are slow until workers were seen."""

    def __init__(self, seen: Path) -> None:
        self.found: set[tuple[str, int]] = set()
        self._seen = seen

    def on_step(self, record: StepRecord) -> None:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in process.net_connections("tcp"):
                    if one.status == psutil.CONN_LISTEN:
                        self.found.add((one.laddr.ip, one.laddr.port))
        if len(self.found) > 2:
            self._seen.touch()


def test_every_socket_of_a_run_on_an_engine_is_at_the_address_and_in_the_range(tmp_path: Path):
    first = 20000 + os.getpid() % 200 * 40
    care = paceline.FaultTolerance(port=first, ports=f"{first + 1}-{first + 39}")
    engine, listening = ProcessEngine(nodes=2, address="::1"), Listening(tmp_path / "seen")
    there = settings(tmp_path / "run", 1, engine=engine, fault_tolerance=care)
    fit(there, [listening, Unhurried(tmp_path / "seen")])
    assert {ip for ip, _ in listening.found} == {"::1"}
    ports = {port for _, port in listening.found}
    assert first in ports
    assert len(ports) > 2  # the workers' too
    assert ports <= {*range(first, first + 40)}
