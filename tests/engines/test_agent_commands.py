"""Commands that keep agents on hosts: those that end before an agent is there, and hosts that are used up.

The commands are shell programs; with real agents they are tested in tests/clusters/ssh and mpi.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
from tests.virtual_clock import VirtualClock
from tests.waiting import wait_for

from paceline.core.clock import Clock
from paceline.core.errors import PlatformError
from paceline.core.version import VERSION
from paceline.engines.agent_commands import AgentCommands
from paceline.engines.agent_fleet import AgentFleet
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest, NodeStatus
from paceline.engines.remote_agent import OTHER_VERSION_CODE
from paceline.engines.ssh.ssh_errors import explain_end

_EXPLAIN = partial(explain_end, python="python3", folder="/work")
# Empty lines are signs of life.
_RUNS = """
read -r secret; echo paceline-agent-runs far 1
while read -r word && [ -z "$word" ]; do :; done
exit 0
"""
_DENIED = "echo 'me@host: Permission denied (publickey).'; exit 255"


@contextmanager
def commands(*programs: str, nodes: int = 1, clock: Clock | None = None) -> Iterator[AgentCommands]:
    made = [
        {"host": f"host{number}", "command": ["sh", "-c", program]} for number, program in enumerate(programs)
    ]
    job = AgentCommands({"nodes": nodes, "commands": made}, bytes(32), _EXPLAIN, clock)
    try:
        yield job
    finally:
        job.stop()


def ended(job: EngineJob) -> Sequence[NodeStatus]:
    wait_for(lambda: all(one.state in ("ended", "lost") for one in job.poll()), "the commands end")
    return job.poll()


def after_scale(job: EngineJob, nodes: int) -> Sequence[NodeStatus]:
    job.scale(nodes)
    return job.poll()


def test_a_shell_that_ends_with_0_before_the_agent_is_there_is_no_agent_that_left():
    with commands("exit 0") as job:
        (status,) = ended(job)
        assert (status.state, status.code) == ("ended", None)
        assert status.reason == "host0: its shell ended before the agent was started"
        assert "~/.bashrc" in status.remedy
        with pytest.raises(PlatformError, match="no host can be used: host0: its shell ended") as error:
            job.scale(1)
        assert error.value.remedy == status.remedy
        assert len(job.poll()) == 1


def test_a_host_with_another_version_names_both():
    program = f"{shlex.quote(sys.executable)} -m paceline.engines.remote_agent 9.9 true"
    with commands(program) as job:
        (status,) = ended(job)
        assert status.code == OTHER_VERSION_CODE
        said = f"(Paceline {VERSION} is installed here, and the job runs 9.9)"
        assert status.reason == f"host0: it has another version of Paceline {said}"
        assert status.remedy == f"install paceline=={VERSION} there"


def test_an_agent_that_was_there_and_ends_with_0_has_left():
    with commands(_RUNS) as job:
        wait_for(lambda: job.poll()[0].state == "running", "the agent is there")
        job.scale(0)
        (status,) = ended(job)
        assert (status.state, status.host, status.code) == ("ended", "far", 0)
        job.scale(1)
        assert len(job.poll()) == 2


def test_hosts_that_cannot_be_used_end_nothing_while_another_may_serve():
    with commands(_DENIED, "exit 9", _RUNS) as job:
        ended(job)
        wait_for(lambda: after_scale(job, 1)[-1].state == "running", "the third host is used")
        assert [status.code for status in job.poll()[:2]] == [255, 9]
        job.scale(2)


def test_the_pause_of_a_host_is_doubled_and_starts_anew_after_an_agent_that_stayed(
    tmp_path,
):
    gate = tmp_path / "gate"
    clock = VirtualClock()
    program = f"""
read -r secret; echo paceline-agent-runs far 1
until [ -e {gate} ]; do sleep 0.01; done
rm {gate}; exit 3
"""
    with commands(program, clock=clock) as job:

        def pause_after(seconds: float) -> float:
            """Have the agent run so long and fail; return how long its host is left alone then."""
            wait_for(lambda: job.poll()[-1].state == "running", "the agent is there")
            clock.advance(seconds)
            gate.touch()
            wait_for(lambda: job.poll()[-1].state == "ended", "the agent has failed")
            there, begun = len(job.poll()), clock.now()
            while len(after_scale(job, 1)) == there:
                clock.advance(0.25)
            return clock.now() - begun

        assert [pause_after(1.0), pause_after(1.0), pause_after(1.0)] == [1.0, 2.0, 4.0]
        assert pause_after(20.0) == 1.0


class _Engine:
    name = "ssh"
    nodes = 2
    workers_per_node = 1

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts

    def host_lines(self) -> Sequence[str]:
        return [f"host{number}" for number in range(self._hosts)]

    def check(self) -> None: ...

    def address_for_nodes(self) -> str:
        return "127.0.0.1"

    def request(self, agents: AgentSpec) -> EngineRequest:
        command = ["sh", "-c", _DENIED]
        hosts = [{"host": host, "command": command} for host in self.host_lines()]
        return {"nodes": agents.nodes, "commands": hosts}

    def submit(self, request: EngineRequest, secret: bytes) -> EngineJob:
        return AgentCommands(request, secret, _EXPLAIN)


@pytest.mark.parametrize("hosts", [3, 5])
def test_a_run_without_a_host_that_can_be_used_ends_at_once_with_one_remedy(hosts):
    said: list[str] = []
    spec = AgentSpec(run="run", address=("127.0.0.1", 9), nodes=2, workers_per_node=1)
    fleet = AgentFleet(_Engine(hosts), spec, bytes(32), said.append)
    fleet.start()
    try:
        wait_for(lambda: fleet.failure is not None, "the run is given up")
    finally:
        fleet.close()
    denied = "; ".join(f"host{number}: permission denied" for number in range(hosts))
    assert str(fleet.failure) == (
        f"no host can be used: {denied}\n"
        "  try: let ssh get in without a password: 'ssh-copy-id host0', identity= or user="
    )
    # Each was tried once, and nothing but the error says what to do.
    assert sum("is ended" in line for line in said) == hosts
    assert not any("ssh-copy-id" in line for line in said)
