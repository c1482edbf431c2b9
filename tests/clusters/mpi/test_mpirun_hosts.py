"""Agents that mpirun starts on hosts with a real sshd: the contract of engines, from outside of mpirun."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import pytest
from tests.clusters.ssh import ssh_hosts
from tests.clusters.ssh.ssh_hosts import PORT, ROOT, SshHosts
from tests.clusters.ssh.test_ssh_contract import SshLab
from tests.waiting import wait_for

from paceline.engines.engine import AgentSpec
from paceline.engines.mpi.mpi_engine import Mpi
from paceline.testing.engine_contract import check_faults

_MPIRUN = "/usr/bin/mpirun"
_WHY_NOT = ssh_hosts.why_not() or ("" if shutil.which(_MPIRUN) else "no mpirun: apt-get install openmpi-bin")

pytestmark = [
    pytest.mark.netns,
    pytest.mark.mpi,
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "mpirun is here"),
    pytest.mark.timeout(300),
]


def _engine(lab_hosts: SshHosts, numbers: Sequence[int], **settings: Any) -> Mpi:
    known = f"-o UserKnownHostsFile={lab_hosts.known_hosts} -o BatchMode=yes"
    ssh = f"ssh -p {PORT} -i {lab_hosts.folder / 'user_key'} {known}"
    given: dict[str, Any] = {
        "hosts": tuple(lab_hosts.hosts.addresses[number] for number in numbers),
        "mpirun": _MPIRUN,
        "options": ("--mca", "plm_rsh_agent", ssh),
        "folder": str(ROOT),
    }
    return Mpi(**{**given, **settings})


@final
class _MpiLab(SshLab):
    """As the ssh engine's: mpirun reaches hosts by ssh."""

    def engine(self, nodes: int, workers_per_node: int) -> Any:
        return _engine(self.hosts, range(1, nodes + 1), nodes=nodes, workers_per_node=workers_per_node)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[_MpiLab]:
    with ssh_hosts.ssh_hosts(2, tmp_path) as hosts:
        yield _MpiLab(hosts)


def test_faults(lab: _MpiLab, tmp_path: Path) -> None:
    check_faults(lab, tmp_path)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hosts": ("10.77.0.99",)}, "10.77.0.99: it cannot be reached; try: check that the machine is up"),
        ({"python": "/nowhere/python3"}, "it has no program /nowhere/python3; try: give the path"),
        ({"folder": "/nowhere"}, "the run's folder is not there"),
    ],
)
def test_hosts_that_cannot_be_used(lab: _MpiLab, settings: dict[str, Any], reason: str) -> None:
    hosts = lab.hosts
    engine = _engine(hosts, [1], **settings)
    spec = AgentSpec(run="run", address=(hosts.hosts.addresses[0], 9), nodes=1, workers_per_node=1)
    with hosts.on_first():
        job = engine.submit(engine.request(spec), bytes(32))
        try:
            wait_for(lambda: job.poll()[0].state in ("ended", "lost"), "mpirun gives up")
            assert reason in job.poll()[0].reason
        finally:
            job.stop()
    assert not lab.left_running()
