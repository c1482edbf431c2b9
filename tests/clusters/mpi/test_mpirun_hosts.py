"""Agents that mpirun starts on hosts with a real sshd: the contract of engines, from outside of mpirun."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import pytest
from tests.clusters.mpi.mpirun import MARK, mpi_run
from tests.clusters.ssh import ssh_hosts
from tests.clusters.ssh.ssh_hosts import PORT, ROOT, SshHosts
from tests.clusters.ssh.test_ssh_contract import SshLab, check_refused_at_once
from tests.waiting import wait_for

from paceline.core.version import VERSION
from paceline.engines import agent_commands
from paceline.engines.engine import AgentSpec
from paceline.engines.mpi.mpi_engine import Mpi
from paceline.testing.engine_contract import check_caller_killed, check_faults, check_stop_and_resume
from paceline.testing.engine_contract.cases import undisturbed_hash

_MPIRUN = "/usr/bin/mpirun"
_WHY_NOT = ssh_hosts.why_not() or ("" if shutil.which(_MPIRUN) else "no mpirun: apt-get install openmpi-bin")

pytestmark = [
    pytest.mark.netns,
    pytest.mark.mpi,
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "mpirun is here"),
    pytest.mark.timeout(300),
]


def _ssh(hosts: SshHosts) -> str:
    """Return the command with which mpirun reaches hosts."""
    known = f"-o UserKnownHostsFile={hosts.known_hosts} -o BatchMode=yes"
    return f"ssh -p {PORT} -i {hosts.folder / 'user_key'} {known}"


def _engine(lab_hosts: SshHosts, numbers: Sequence[int], **settings: Any) -> Mpi:
    given: dict[str, Any] = {
        "hosts": tuple(lab_hosts.hosts.addresses[number] for number in numbers),
        "mpirun": _MPIRUN,
        "options": ("--mca", "plm_rsh_agent", _ssh(lab_hosts)),
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
    with ssh_hosts.ssh_hosts(3, tmp_path) as hosts:
        yield _MpiLab(hosts)


def test_faults(lab: _MpiLab, tmp_path: Path) -> None:
    check_faults(lab, tmp_path)


def test_stop_and_resume_on_another_number_of_hosts(lab: _MpiLab, tmp_path: Path) -> None:
    check_stop_and_resume(lab, tmp_path)


def test_the_caller_is_killed(lab: _MpiLab, tmp_path: Path) -> None:
    check_caller_killed(lab, tmp_path)


def test_ranks_of_one_mpirun_on_two_hosts(lab: _MpiLab, tmp_path: Path) -> None:
    """`mpirun --host b,c python script.py`: ranks meet by the file in the folder that the hosts share."""
    hosts = lab.hosts
    options = ["--host", ",".join(hosts.hosts.addresses[1:3]), "--mca", "plm_rsh_agent", _ssh(hosts)]
    for name in ("PYTHONPATH", MARK):
        options += ["-x", name]
    with hosts.on_first(), mpi_run(tmp_path, _MPIRUN, *options, ranks=2) as run:
        run.events.until_size(2)
        before = run.events.view
        assert sorted(before.hosts) == ["b", "c"]
        os.kill(before.pids[1], signal.SIGKILL)
        run.events.until_size(2, after=before.generation)
        assert run.finish() == [undisturbed_hash(tmp_path)] * 2
        run.events.check_once()
    assert not lab.left_running()


def test_no_host_has_the_python_of_the_command(lab: _MpiLab, tmp_path: Path) -> None:
    engine = _engine(lab.hosts, [1, 2], python="/nowhere/python3")
    reasons = [f"{host}: it has no program /nowhere/python3" for host in engine.hosts]
    check_refused_at_once(lab, tmp_path, engine, f"{'; '.join(reasons)}\n  try: give the path of Python")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"hosts": ("10.77.0.99",)}, "10.77.0.99: it cannot be reached; try: check that the machine is up"),
        ({"python": "/nowhere/python3"}, "it has no program /nowhere/python3; try: give the path"),
        ({"folder": "/nowhere"}, "the run's folder is not there"),
        ({"version": "9.9"}, f"Paceline {VERSION} is installed here, and the job runs 9.9"),
    ],
)
def test_hosts_that_cannot_be_used(
    lab: _MpiLab, settings: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = lab.hosts
    if "version" in settings:
        monkeypatch.setattr(agent_commands, "VERSION", settings["version"])
        settings = {"python": sys.executable}
    engine = _engine(hosts, [1], **settings)
    spec = AgentSpec(run="run", address=(hosts.hosts.addresses[0], 9), nodes=1, workers_per_node=1)
    with hosts.on_first():
        job = engine.submit(engine.request(spec), bytes(32))
        try:
            wait_for(lambda: job.poll()[0].state in ("ended", "lost"), "mpirun gives up")
            status = job.poll()[0]
            assert reason in f"{status.reason}; try: {status.remedy}", status
        finally:
            job.stop()
    assert not lab.left_running()
