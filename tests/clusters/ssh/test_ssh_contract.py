"""The contract of engines on the ssh engine, with a real sshd on three hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.ssh import ssh_hosts as lab
from tests.clusters.ssh.ssh_hosts import ROOT, SshHosts, engine_words

from paceline.engines.ssh.ssh_engine import Ssh
from paceline.testing.engine_contract import (
    EngineLab,
    check_caller_killed,
    check_faults,
    check_stop_and_resume,
)

_SCRIPT = """
from tests.train import small_run
if __name__ == "__main__":
    small_run.fit(small_run.settings("unused", 1))
"""

_WHY_NOT = lab.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "sshd is here"),
    pytest.mark.timeout(300),
]


class SshLab(EngineLab):
    """See EngineLab. Hosts 1, 2, 3 are called b, c, d."""

    has_spare_node = False

    def __init__(self, hosts: SshHosts) -> None:
        self.hosts = hosts
        self._lost: list[int] = []

    def engine(self, nodes: int, workers_per_node: int) -> Ssh:
        # A host beyond those that are used would be a spare that replaces a lost one before one is added.
        numbers = range(1, nodes + 1)
        return self.hosts.engine(*numbers, nodes=nodes, workers_per_node=workers_per_node)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PACELINE_HOST": "a"}
        return self.hosts.hosts.start(0, command, env=environment, cwd=ROOT, **options)

    def kill_process(self, node: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self, node: str) -> None:
        (agent,) = self.hosts.agents(_number(node))
        os.kill(agent, signal.SIGKILL)

    def lose_node(self, node: str) -> None:
        """Cut it off and kill all of it: nobody is told."""
        number = _number(node)
        self.hosts.hosts.cut(number)
        for pid in self.hosts.hosts.pids(number):
            os.kill(pid, signal.SIGKILL)
        self._lost.append(number)

    def add_node(self) -> None:
        number = self._lost.pop()
        self.hosts.hosts.heal(number)
        self.hosts.start(number)

    def left_running(self) -> list[str]:
        found = []
        for number in range(1, len(self.hosts.hosts.names)):
            for pid in self.hosts.hosts.pids(number):
                try:
                    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                except OSError:
                    continue  # it has ended since
                if "sshd" not in line:
                    found.append(f"{pid}: {line}")
        return found


def _number(node: str) -> int:
    return "abcdefgh".index(node)


def check_refused_at_once(lab: SshLab, folder: Path, engine: Any, reason: str) -> None:
    """Train by the command on hosts of which none can be used: one error, one remedy, and nothing is left."""
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    command = [sys.executable, "-m", "paceline", "train", str(script), "--run-dir", str(folder / "run")]
    process = lab.start(
        [*command, *engine_words(engine)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _, said = process.communicate(timeout=100)
    assert process.returncode == 1, said
    assert f"error: no host can be used: {reason}" in said, said
    assert (said.count("try:"), said.count(" is ended: ")) == (1, len(engine.hosts)), said
    assert not lab.left_running()


@pytest.fixture
def ssh_lab(tmp_path: Path) -> Iterator[SshLab]:
    with lab.ssh_hosts(3, tmp_path) as hosts:
        yield SshLab(hosts)


def test_faults(ssh_lab: SshLab, tmp_path: Path) -> None:
    run = check_faults(ssh_lab, tmp_path)
    # What agents write is shown with the name of their host.
    assert "[b] joined the job" in run.output
    assert "is lost: " in run.output


def test_stop_and_resume_on_another_number_of_hosts(ssh_lab: SshLab, tmp_path: Path) -> None:
    check_stop_and_resume(ssh_lab, tmp_path)


def test_the_caller_is_killed(ssh_lab: SshLab, tmp_path: Path) -> None:
    check_caller_killed(ssh_lab, tmp_path)


def test_no_host_lets_the_command_in(ssh_lab: SshLab, tmp_path: Path) -> None:
    engine = ssh_lab.hosts.engine(1, 2, identity=str(ssh_lab.hosts.folder / "other_key"))
    first, second = engine.hosts
    reason = f"{first}: permission denied; {second}: permission denied\n  try: let ssh get in"
    check_refused_at_once(ssh_lab, tmp_path, engine, reason)
