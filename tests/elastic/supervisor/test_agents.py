"""Agents: the payload in chunks, messages that wait for it, reconnects, and machines that are given up."""

from __future__ import annotations

import hashlib
import os

import pytest
from tests.elastic.supervisor.shell_parts import Shell, hello

from paceline.control.messages import (
    AgentAccepted,
    AgentEnd,
    AgentHello,
    AgentNotice,
    AgentStart,
    PayloadChunk,
    StackReply,
    StackRequest,
    WorkerExited,
)
from paceline.elastic.machine.machine_events import AgentJoined, AgentLost, ProcessProbed
from paceline.elastic.supervisor import agents as agents_module
from paceline.elastic.supervisor.agents import payload_digest


def test_an_agent_gets_the_payload_before_a_start(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agents_module, "PAYLOAD_CHUNK_BYTES", 16)
    data = os.pread(shell.payload, 1 << 20, 0)
    agent = shell.agent()
    shell.workers.start(7, 2, 1)
    accepted, *rest = agent.received()
    assert isinstance(accepted, AgentAccepted)
    assert (accepted.agent, accepted.payload_bytes) == (1, len(data))
    assert accepted.digest == hashlib.sha256(data).hexdigest() == payload_digest(shell.payload)
    assert b"".join(chunk.data for chunk in rest[:-1] if isinstance(chunk, PayloadChunk)) == data
    assert isinstance(rest[-1], AgentStart)
    (event,) = shell.emitted()
    assert event == AgentJoined(1, 2, "far")


def test_an_agent_that_reconnects_keeps_its_number_and_gets_what_waited(shell: Shell):
    shell.agent().channel.close()
    shell.deliver()
    assert shell.agents.is_away(1)
    assert not shell.agents.request(1, StackRequest(member=7))  # an answer would come too late
    shell.workers.start(7, 2, 1)
    shell.pass_time(9.0)
    agent = shell.agent(number=1)
    kinds = [type(message) for message in agent.received()]
    assert kinds == [AgentAccepted, AgentStart]  # it has the payload
    shell.pass_time(20.0)
    assert not [event for event in shell.emitted() if isinstance(event, AgentLost)]


def test_an_agent_that_stays_away_is_given_up_with_its_workers(shell: Shell):
    agent = shell.agent()
    shell.workers.start(7, 2, 1)
    agent.channel.close()
    shell.deliver()
    shell.pass_time(9.9)
    assert 7 in shell.records.live
    shell.pass_time(0.2)
    assert 7 not in shell.records.live
    assert shell.emitted()[-1] == AgentLost(1, "the agent on far is gone")
    again = shell.agent(number=1)  # as a new one, that has the payload
    assert [type(one) for one in again.received()] == [AgentAccepted]
    assert shell.emitted()[-1] == AgentJoined(2, 2, "far")


def test_an_agent_of_an_earlier_supervisor_is_expected_under_its_number(shell: Shell):
    shell.agents.expect(4)
    shell.agents.expect(4)
    shell.agent(number=4)
    assert shell.emitted() == [AgentJoined(4, 2, "far")]
    shell.agent()
    assert shell.emitted() == [AgentJoined(5, 2, "far")]


def test_an_agent_that_is_expected_in_vain_is_given_up(shell: Shell):
    shell.agents.expect(4)
    shell.pass_time(10.1)
    assert [type(event) for event in shell.emitted()] == [AgentLost]


def test_of_two_connections_of_an_agent_the_last_counts(shell: Shell):
    first = shell.agent()
    second = shell.agent(number=1)
    assert first.is_cut
    second.received()
    shell.agents.send(1, AgentNotice(text="a text"))
    assert second.received() == [AgentNotice(text="a text")]
    shell.pass_time(20.0)
    assert AgentLost not in [type(event) for event in shell.emitted()]


def test_an_agent_leaves_when_it_is_asked_to(shell: Shell):
    agent = shell.agent()
    shell.emitted()
    agent.send(AgentHello(workers=0, host="g", hostname="far", pid=9))
    shell.deliver()
    assert shell.emitted() == [AgentLost(1, "it was asked to leave")]
    agent.send(WorkerExited(member=7, status=0, reason=""))  # on its way before
    shell.deliver()
    assert not agent.is_cut


def test_a_refused_agent_hears_why(shell: Shell):
    agent = shell.agent()
    agent.received()
    shell.workers.remove_agent(1, "other bits", refuse=True)
    shell.workers.remove_agent(1, "other bits", refuse=True)
    assert agent.received() == [AgentEnd(member=-1, reason="other bits", code=1)]
    assert not agent.is_cut
    shell.pass_time(6.0)
    assert agent.is_cut


def test_an_agent_speaks_for_its_own_workers_only(shell: Shell):
    agent, other = shell.agent(), shell.agent()
    shell.workers.start(7, 2, 1)
    shell.emitted()
    reply = StackReply(member=7, state="", frames=(), stopped=True)
    other.send(reply)
    shell.deliver()
    assert not shell.emitted()
    agent.send(reply)
    shell.deliver()
    assert shell.emitted() == [ProcessProbed(7, True)]


def test_what_is_not_an_agents_to_send_ends_its_connection(shell: Shell):
    agent = shell.agent()
    agent.send(hello(7, 2))
    shell.deliver()
    assert agent.is_cut
    assert shell.agents.is_away(1)


def test_a_probe_and_a_stack_are_asked_for(shell: Shell):
    agent = shell.agent()
    agent.received()
    shell.workers.start(7, 2, 1)
    agent.received()
    shell.probe.probe([7, 99])
    assert shell.agents.request(1, StackRequest(member=7))
    assert agent.received() == [StackRequest(member=7, probe=True), StackRequest(member=7)]
    assert not shell.agents.request(3, StackRequest(member=7))


def test_at_the_end_of_the_job_agents_end(shell: Shell):
    agent = shell.agent()
    agent.received()
    shell.agents.close("finished")
    assert agent.received() == [AgentEnd(member=-1, reason="finished")]


def test_agents_are_told_that_a_job_ends_before_its_training(shell: Shell):
    agent = shell.agent()
    agent.received()
    shell.agents.close("SIGTERM", unfinished=True)
    assert agent.received() == [AgentEnd(member=-1, reason="SIGTERM", code=75)]
