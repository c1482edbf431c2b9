"""The ssh engine's job against real sshd: agents join a run, are lost, replaced, leave, and are refused."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.clusters.ssh import ssh_hosts as lab
from tests.clusters.ssh.ssh_hosts import SshHosts
from tests.network.joined_runs import Run
from tests.waiting import wait_for

from paceline.core import events
from paceline.core.version import VERSION
from paceline.engines import agent_commands
from paceline.engines.engine import AgentSpec, EngineJob, NodeStatus
from paceline.engines.ssh.ssh_engine import Ssh

_WHY_NOT = lab.why_not()

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "sshd is here"),
    pytest.mark.timeout(180),
]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with lab.ssh_hosts(2, tmp_path) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def shared_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with lab.ssh_hosts(1, tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@contextmanager
def _submitted(
    hosts: SshHosts, engine: Ssh, secret: bytes = bytes(32), *, nodes: int, port: int = 9
) -> Iterator[EngineJob]:
    with hosts.on_first():
        engine.check()
        address = engine.address_for_nodes()
        assert address == hosts.hosts.addresses[0]
        spec = AgentSpec(run="run", address=(address, port), nodes=nodes, workers_per_node=1)
        job = engine.submit(engine.request(spec), secret)
        try:
            yield job
        finally:
            job.stop()
            job.stop()


def _nodes_after_scale(job: EngineJob, nodes: int) -> int:
    job.scale(nodes)
    return len(job.poll())


def _states(job: EngineJob) -> list[str]:
    return [status.state for status in job.poll()]


def _until(run: Run, hosts: str, after: int) -> None:
    """Wait until workers of these hosts, in whatever order they came, train together."""

    def is_there() -> bool:
        view = run.view
        return view.generation > after and sorted(view.hosts) == list(hosts) and run.last_step > view.step

    wait_for(is_there, f"a view of {hosts}")


def _shown(pid: int) -> str:
    """Return what the system shows of a process: its command line and its environment."""
    try:
        return "".join(Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "environ"))
    except OSError:
        return ""  # it has ended


def _only_end(job: EngineJob) -> NodeStatus:
    wait_for(lambda: all(state in ("ended", "lost") for state in _states(job)), "the agent ends")
    (status,) = job.poll()
    return status


def test_agents_join_are_replaced_by_a_spare_host_and_leave(
    hosts: SshHosts, tmp_path: Path, undisturbed: str
) -> None:
    run = Run(hosts.hosts, tmp_path, "bind=0.0.0.0")
    secret = bytes.fromhex(run.token.read_text())
    engine = hosts.engine(1, 2, nodes=1)
    with _submitted(hosts, engine, bytes(32), nodes=1, port=run.port) as job:
        status = _only_end(job)
        assert (status.state, status.code) == ("ended", 1)
        assert "it does not know this secret" in status.reason
    with _submitted(hosts, engine, secret, nodes=1, port=run.port) as job:
        _until(run, "aab", 0)
        assert _states(job) == ["running"]
        assert job.poll()[0].host == "b"
        lines: list[str] = []

        def has_joined() -> bool:
            lines.extend(line.text for line in job.logs())
            return any("joined the job" in line for line in lines)

        wait_for(has_joined, "its log")
        # The secret came through ssh's standard input: other users of the machines can see it nowhere.
        assert len(hosts.hosts.pids(1)) > 2
        shown = "".join(_shown(pid) for number in (0, 1) for pid in hosts.hosts.pids(number))
        assert secret.hex() not in shown + "".join(lines)

        # The agent is killed: the spare host takes its place.
        generation = run.view.generation
        (agent,) = hosts.agents(1)
        os.kill(agent, signal.SIGKILL)
        wait_for(lambda: _states(job) == ["ended"], "the end is seen")
        assert job.poll()[0].code == 128 + signal.SIGKILL
        job.scale(1)
        _until(run, "aac", generation)
        generation = run.view.generation

        # Another node, on the host that had been left; then it goes at a step boundary.
        wait_for(lambda: _nodes_after_scale(job, 2) == 3, "the host is used again")
        _until(run, "aabc", generation)
        generation, repaired = run.view.generation, len(run.of(events.Repaired))
        job.scale(1)
        wait_for(lambda: _states(job) == ["ended", "running", "ended"], "the newest leaves")
        assert job.poll()[2].code == 0
        _until(run, "aac", generation)
        assert len(run.of(events.Repaired)) == repaired

        # sshd is killed: its agent ends although nobody could tell it to.
        hosts.kill_sshd(2)
        wait_for(lambda: not hosts.hosts.pids(2), "the agent ends with its connection")
        wait_for(lambda: _states(job)[1] == "lost", "the loss is seen")
        assert run.finish() == undisturbed
        run.check_exactly_once()
    assert not hosts.agents(1) + hosts.agents(2)


def test_a_cut_link_is_a_lost_node_and_stop_leaves_nothing(
    hosts: SshHosts, tmp_path: Path, undisturbed: str
) -> None:
    run = Run(hosts.hosts, tmp_path, "bind=0.0.0.0", "patience=4")
    secret = bytes.fromhex(run.token.read_text())
    with _submitted(hosts, hosts.engine(1, 2), secret, nodes=2, port=run.port) as job:
        _until(run, "aabc", 0)
        generation = run.view.generation
        hosts.hosts.cut(1)
        _until(run, "aac", generation)
        wait_for(lambda: "lost" in _states(job), "ssh notices")
        (lost,) = (status for status in job.poll() if status.state == "lost")
        assert "10.77.0.2:2222: its ssh connection ended" in lost.reason
        wait_for(lambda: not hosts.agents(1), "the agent leaves: the supervisor stays away")
        hosts.hosts.heal(1)
        job.stop()
        assert "running" not in _states(job)
        wait_for(lambda: not hosts.agents(2), "stop ends the agent")
        assert run.finish() == undisturbed
        run.check_exactly_once()


@pytest.mark.parametrize(
    ("settings", "state", "reason"),
    [
        ({"identity": "other_key"}, "ended", "permission denied; try: .*ssh-copy-id"),
        (
            {"options": ("UserKnownHostsFile=none_known",)},
            "ended",
            "host key is not known here; try: connect",
        ),
        ({"hosts": ("10.77.0.2:2223",)}, "lost", "nothing listens at its ssh port"),
        ({"hosts": ("10.77.0.99",)}, "lost", "it cannot be reached"),
        ({"python": "/nowhere/python3"}, "ended", "it has no program /nowhere/python3"),
        ({"folder": "/nowhere"}, "ended", "it has no folder /nowhere"),
        ({"options": ("NoSuchOption=1",)}, "ended", "ssh does not understand its options"),
        ({"identity": "forced_key"}, "ended", "its shell ended before the agent was started; try: see what"),
        ({"version": "9.9"}, "ended", f"Paceline {VERSION} is installed here, and the job runs 9.9"),
    ],
)
def test_hosts_that_cannot_be_used(
    shared_hosts: SshHosts,
    settings: dict[str, Any],
    state: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = shared_hosts
    if "version" in settings:
        monkeypatch.setattr(agent_commands, "VERSION", settings["version"])
        settings = {}
    if "identity" in settings:
        settings = {"identity": str(hosts.folder / settings["identity"])}
    elif settings.get("options") == ("UserKnownHostsFile=none_known",):
        settings = {"options": (f"UserKnownHostsFile={hosts.folder / 'none_known'}",)}
    with _submitted(hosts, hosts.engine(1, **settings), nodes=1) as job:
        status = _only_end(job)
        assert status.state == state
        assert re.search(reason, f"{status.reason}; try: {status.remedy}"), status
        assert status.code != 0  # of an agent that left
    assert not hosts.agents(1)
