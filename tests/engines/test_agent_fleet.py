"""The agents of a run: replaced when lost, given up when none stays, their output shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from tests.virtual_clock import VirtualClock

from paceline.core.errors import CommTimeoutError, UnavailableError, UsageError
from paceline.engines.agent_fleet import POLL_SECONDS, AgentFleet
from paceline.engines.engine import AgentSpec, EngineJob, EngineRequest, LogLine, NodeState, NodeStatus

SPEC = AgentSpec(run="r", address=("10.0.0.1", 4000), nodes=2, workers_per_node=1)


@dataclass
class ScriptedJob:
    """Agents whose states the test sets."""

    agents: list[NodeStatus] = field(default_factory=list)
    lines: list[LogLine] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    stopped: int = 0
    broken: Exception | None = None

    def poll(self) -> Sequence[NodeStatus]:
        return list(self.agents)

    def scale(self, nodes: int) -> None:
        if self.broken is not None:
            raise self.broken
        self.asked.append(nodes)

    def logs(self) -> Iterable[LogLine]:
        lines, self.lines = self.lines, []
        return lines

    def stop(self) -> None:
        self.stopped += 1

    def put(
        self, node: int, state: NodeState, code: int | None = None, reason: str = "", remedy: str = ""
    ) -> None:
        status = NodeStatus(node, state, f"host{node}", code, reason, remedy)
        self.agents = [status if one.node == node else one for one in self.agents]
        if node not in [one.node for one in self.agents]:
            self.agents.append(status)


@dataclass(frozen=True)
class ScriptedEngine:
    job: ScriptedJob
    name: str = "scripted"
    nodes: int = 2
    workers_per_node: int = 1
    refuses: bool = False

    def check(self) -> None: ...

    def address_for_nodes(self) -> str:
        return "10.0.0.1"

    def request(self, agents: AgentSpec) -> EngineRequest:
        return {"nodes": agents.nodes}

    def submit(self, request: EngineRequest, secret: bytes) -> EngineJob:
        if self.refuses:
            raise UsageError("no such partition", remedy="name another")
        return self.job


@dataclass(frozen=True)
class EngineOfHosts(ScriptedEngine):
    hosts: int = 0

    def host_lines(self) -> tuple[str, ...]:
        return tuple(f"host{number}" for number in range(self.hosts))


class Fleet:
    def __init__(self, hosts: int = 0) -> None:
        self.clock, self.job, self.said = VirtualClock(), ScriptedJob(), list[str]()
        engine = EngineOfHosts(self.job, hosts=hosts) if hosts else ScriptedEngine(self.job)
        self.fleet = AgentFleet(engine, SPEC, b"s" * 32, self.said.append, self.clock)

    def turn(self, after: float = 0.3) -> None:
        self.clock.advance(after)
        self.fleet.turn(self.job)


def test_what_is_missing_is_asked_for_and_what_is_there_is_not():
    it = Fleet()
    it.job.put(0, "running")
    it.job.put(1, "pending")
    it.turn()
    assert it.job.asked == []
    it.job.put(1, "lost", reason="NODE_FAIL")
    it.turn()
    it.turn(1.0)
    assert it.job.asked == [2]
    assert it.said == ["agent 0 runs on host0", "agent 1 on host1 is lost: NODE_FAIL"]


def test_agents_that_fail_at_once_are_asked_for_less_and_less_often_and_then_given_up():
    it = Fleet()
    it.fleet.scale(1)
    asked = []
    it.job.lines.append(LogLine(0, "no module named paceline"))
    for node in range(8):
        it.job.agents.clear()
        it.job.put(node, "running")
        it.turn()
        it.job.put(node, "ended", 1, "exit code 1")
        begun = it.clock.now()
        while not it.job.asked and it.fleet.failure is None:
            it.turn(0.25)
        if it.fleet.failure is not None:
            break
        asked.append(it.clock.now() - begun)
        it.job.asked.clear()
    assert asked == sorted(asked)
    assert len(asked) == 3
    assert asked[-1] >= 4 * 0.5
    assert it.fleet.failure is not None
    assert "no agent of scripted stayed" in it.fleet.failure.message
    assert "no module named paceline" in it.fleet.failure.message
    assert "10.0.0.1:4000" in it.fleet.failure.remedy


def test_every_host_that_is_named_is_tried_before_the_run_is_given_up():
    it = Fleet(hosts=6)
    it.fleet.scale(1)
    for node in range(7):
        assert it.fleet.failure is None, node
        it.job.agents.clear()
        it.job.put(node, "running")
        it.turn()
        it.job.put(node, "ended", 255, "ssh: no route to host")
        it.turn()
    assert it.fleet.failure is not None


def test_hosts_that_are_named_are_tried_one_after_the_other_without_a_pause():
    it = Fleet(hosts=20)
    it.fleet.scale(1)
    begun = it.clock.now()
    for node in range(20):
        it.job.put(node, "ended", 255, "permission denied")
        it.turn(POLL_SECONDS)
        assert it.job.asked == [1] * (node + 1)
    it.job.broken = UsageError("no host can be used: permission denied")
    it.turn(POLL_SECONDS)
    assert it.fleet.failure is it.job.broken
    assert it.clock.now() - begun < 10.0


def test_no_run_is_given_up_while_an_agent_is_being_started():
    it = Fleet()
    for node in range(4):
        it.job.put(node, "running")
        it.job.put(9, "pending")  # it has a host, and no process yet
        it.turn()
        it.job.put(node, "ended", 1)
        it.turn()
    assert it.fleet.failure is None
    it.turn(31.0)
    assert it.fleet.failure is not None


def test_agents_that_stayed_before_they_were_lost_do_not_count_against_the_run():
    it = Fleet()
    for node in range(10):
        it.job.agents.clear()
        it.job.put(node, "running")
        it.turn()
        it.turn(30.0)
        it.job.put(node, "lost")
        it.turn()
    assert it.fleet.failure is None


def test_an_agent_that_left_is_replaced_without_a_word():
    it = Fleet()
    it.job.put(0, "running")
    it.job.put(1, "running")
    it.turn()
    it.said.clear()
    it.job.put(1, "ended", 0)
    it.turn()
    assert (it.job.asked, it.said) == ([2], [])


def test_another_size_is_asked_for_once_it_is_known():
    it = Fleet()
    for node in range(2):
        it.job.put(node, "running")
    it.turn()
    it.fleet.scale(3)
    it.turn()
    assert it.job.asked == [3]
    it.job.put(2, "running")
    it.fleet.scale(1)
    it.turn()
    assert it.job.asked == [3, 1]


@pytest.mark.parametrize(
    "broken",
    [
        UnavailableError("the controller is away", remedy="wait"),
        CommTimeoutError("the controller does not answer", waiting_for=[], remedy="wait"),
        ConnectionError("the client was disconnected"),
    ],
)
def test_an_engine_that_is_away_ends_nothing_while_an_agent_runs(broken: Exception):
    it = Fleet()
    for node in range(2):
        it.job.put(node, "running")
    it.turn()
    it.job.put(1, "lost")
    it.job.broken = broken
    for _ in range(100):
        it.turn()
    assert it.fleet.failure is None
    assert sum("training goes on" in line and str(broken)[:20] in line for line in it.said) == 1
    it.job.broken = None
    it.turn(after=6.0)
    assert it.job.asked == [2]
    it.job.put(1, "running")
    it.turn()
    assert it.fleet.failure is None


def test_an_engine_that_is_away_with_no_agent_left_is_the_runs_failure():
    it = Fleet()
    it.job.broken = ConnectionError("the client was disconnected")
    it.turn()
    assert isinstance(it.fleet.failure, UnavailableError)
    assert "scripted cannot be asked about the agents: ConnectionError" in it.fleet.failure.message


def test_an_engine_that_is_away_when_the_last_agent_is_lost_has_some_time_to_come_back():
    it = Fleet()
    it.fleet.scale(1)
    it.job.put(0, "running")
    it.turn()
    it.turn(30.0)
    it.job.put(0, "lost", reason="preempted")
    it.job.broken = CommTimeoutError("the controller does not answer", waiting_for=[], remedy="wait")
    for _ in range(20):
        it.turn(5.1)
    assert it.fleet.failure is None
    assert it.said[-1] == "the controller does not answer; what the run lacks is asked for again"
    it.job.broken = None
    it.turn(5.1)
    assert it.job.asked == [1]
    # The next absence has as much time, and one that lasts ends the run.
    it.job.broken = UnavailableError("the controller is away", remedy="wait")
    for _ in range(20):
        it.turn(5.1)
    assert it.fleet.failure is None
    for _ in range(5):
        it.turn(5.1)
    assert it.fleet.failure is it.job.broken


def test_an_engine_that_refuses_when_the_last_agent_is_lost_ends_the_run_at_once():
    it = Fleet()
    it.job.put(0, "running")
    it.turn()
    it.turn(30.0)
    it.job.put(0, "lost")
    it.job.broken = UsageError("the account has no hours left")
    it.turn()
    assert it.fleet.failure is it.job.broken


def test_a_wait_is_mentioned_once_with_the_engines_reason():
    it = Fleet()
    it.job.put(0, "pending", reason="Resources")
    it.turn(5.0)
    it.turn(6.0)
    it.turn(6.0)
    assert [line for line in it.said if "wait" in line] == ["1 agent waits for a node of scripted: Resources"]


def test_a_reason_that_the_engine_finds_out_later_is_mentioned():
    it = Fleet()
    it.job.put(0, "pending")
    it.turn()
    it.turn(11.0)
    it.job.put(0, "pending", reason="exceeded quota")
    it.turn()
    it.job.put(0, "pending", reason="Unschedulable")
    it.turn()
    it.turn(30.0)
    waits = "1 agent waits for a node of scripted"
    assert it.said == [waits, f"{waits}: exceeded quota"]
    it.turn(40.0)
    assert it.said[2:] == [f"{waits}: Unschedulable"]
    it.job.put(0, "running")
    it.turn()
    # A node is lost, and the next wait is one of its own.
    it.job.put(1, "pending", reason="Unschedulable")
    it.turn()
    it.turn(11.0)
    assert it.said[3:] == ["agent 0 runs on host0", f"{waits}: Unschedulable"]
    it.fleet.close()
    it.fleet.close()
    assert it.said[5:] == [f"at the end {waits}: Unschedulable"]


def test_what_to_do_about_a_host_is_the_errors_remedy_or_is_said_while_others_train():
    it = Fleet(hosts=4)
    it.job.put(0, "ended", reason="host0: no folder", remedy="make it")
    it.turn()
    assert it.said == ["agent 0 on host0 is ended: host0: no folder"]
    it.job.put(1, "running")
    it.turn()
    it.turn()
    assert it.said[1:] == ["agent 1 runs on host1", "to have host0 again: make it"]
    it.job.put(1, "lost")
    for node in range(2, 5):
        it.job.put(node, "lost", reason=f"host{node}: no sshd", remedy="start it")
    it.turn()
    assert it.fleet.failure is not None
    assert it.fleet.failure.remedy == "start it"
    assert sum("start it" in line for line in [*it.said, it.fleet.failure.message]) == 0


def test_the_output_of_agents_names_the_node_and_carries_no_control_characters():
    it = Fleet()
    it.job.put(0, "running")
    it.turn()
    it.job.lines.append(LogLine(0, "loss 0.5\x1b[2J"))
    it.turn()
    assert it.said[-1].startswith("[host0] loss 0.5")
    assert "\x1b" not in it.said[-1]


def test_a_refused_submission_is_the_callers_error_and_nothing_is_left():
    job = ScriptedJob()
    fleet = AgentFleet(ScriptedEngine(job, refuses=True), SPEC, b"s" * 32, print)
    with pytest.raises(UsageError, match="no such partition"):
        fleet.start()
    fleet.close()
    assert job.stopped == 0


def test_closing_ends_the_agents_once():
    job = ScriptedJob()
    fleet = AgentFleet(ScriptedEngine(job), SPEC, b"s" * 32, print)
    fleet.start()
    fleet.close()
    fleet.close()
    assert job.stopped == 1


def test_the_command_of_an_agent():
    spec = AgentSpec(run="r", address=("fd77::1", 4000), nodes=1, workers_per_node=3, ports="42000-42100")
    assert spec.shell_command("/dev/stdin", "/opt/python") == (
        "/opt/python -m paceline join '[fd77::1]:4000' --token-file /dev/stdin --workers 3 "
        "--ports 42000-42100"
    )


def test_waiting_for_a_node_is_no_work_of_an_agent_that_then_fails_at_once():
    it = Fleet()
    it.fleet.scale(1)
    for node in range(4):
        assert it.fleet.failure is None, node
        it.job.agents.clear()
        it.job.put(node, "pending")
        it.turn()
        it.turn(60.0)  # a cluster that is busy
        it.job.put(node, "ended", 1, "no module named paceline")
        it.turn()
    assert "the last of 4: no module named paceline" in str(it.fleet.failure)
