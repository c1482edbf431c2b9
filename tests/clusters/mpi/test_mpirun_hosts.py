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


def _engine(hosts: SshHosts, numbers: Sequence[int], **settings: Any) -> Mpi:
    ssh = f"ssh -p {PORT} -i {hosts.folder / 'user_key'} -o UserKnownHostsFile={hosts.known_hosts} -o BatchMode=yes"
    given: dict[str, Any] = {
        "hosts": tuple(hosts.hosts.addresses[number] for number in numbers),
        "mpirun": _MPIRUN,
        "options": ("--mca", "plm_rsh_agent", ssh),
        "folder": str(ROOT),
    }
    return Mpi(**{**given, **settings})


@final
class _MpiLab(SshLab):
    """As the ssh engine's: mpirun reaches hosts by ssh."""

    def engine(self, nodes: int, workers_per_node: int) -> Any:
        return _engine(self._hosts, range(1, nodes + 1), nodes=nodes, workers_per_node=workers_per_node)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[_MpiLab]:
    with ssh_hosts.ssh_hosts(2, tmp_path) as hosts:
        yield _MpiLab(hosts)


def test_faults(lab: _MpiLab, tmp_path: Path) -> None:
    check_faults(lab, tmp_path)
