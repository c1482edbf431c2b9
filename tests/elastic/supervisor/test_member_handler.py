"""What members send: who may join, what is heard once, what reaches the journal and the machine."""

from __future__ import annotations

import os

import pytest
from tests.elastic.supervisor.shell_parts import Shell, heartbeat, hello, receipt, step, written

from paceline.control import channel
from paceline.control.messages import (
    Ack,
    AgentEnd,
    Dismissed,
    JournalLines,
    MemberAccepted,
    Prepare,
    ShardComputed,
    Stop,
    View,
    ViewPlan,
    WorkerException,
)
from paceline.core.events import Note, StepCommitted, WorkerStarted
from paceline.elastic.machine.machine_events import AgentLost, FromMember
from paceline.elastic.supervisor.control_port import HELLO_SECONDS
from paceline.elastic.supervisor.member_handler import JoinTerms


def kinds(peer) -> list[type]:
    return [type(message) for message in peer.received()]


def test_a_worker_joins_and_is_told_the_terms(shell: Shell):
    shell.start(7, 2)
    peer = shell.join(7, 2)
    assert peer.received() == [MemberAccepted(heartbeat=0.25, patience=20.0, injected=())]
    (started,) = written(shell.journal_file, WorkerStarted)
    assert (started.rank, started.pid, started.host, started.time) == (2, os.getpid(), "here", 1e9)
    assert shell.emitted() == [FromMember(7, hello(7, 2))]


@pytest.mark.parametrize(
    ("member", "slot", "pid", "reason"),
    [(9, 2, 0, "not expected"), (7, 3, 0, "not expected"), (7, 2, 1, "is process")],
)
def test_a_worker_that_was_not_started_is_refused(
    shell: Shell, member: int, slot: int, pid: int, reason: str
):
    shell.start(7, 2)
    peer = shell.join(member, slot, pid=pid or os.getpid())
    (refusal,) = peer.received()
    assert isinstance(refusal, Dismissed)
    assert refusal.code == 0
    assert reason in refusal.reason
    assert not shell.emitted()
    shell.pass_time(HELLO_SECONDS + 0.1)  # the reason had time to arrive
    assert peer.is_cut


def test_an_expelled_worker_is_not_heard_and_does_not_come_back(shell: Shell):
    record = shell.start(7, 2)
    peer = shell.join(7, 2)
    shell.emitted()
    record.expelled = True
    peer.send(heartbeat(3))
    shell.deliver()
    assert not shell.emitted()
    assert kinds(shell.join(7, 2)) == [Dismissed]


def test_other_bits_are_refused_in_exact_mode_with_their_machine(shell: Shell):
    agent = shell.agent()
    shell.start(7, 2)
    shell.workers.start(8, 3, 1)
    shell.join(7, 2)
    agent.received()
    shell.emitted()
    (refusal,) = shell.join(8, 3, fingerprint={"cpu": "other"}).received()
    assert isinstance(refusal, Dismissed)
    assert refusal.code == 1
    assert "cpu is 'other' instead of 'same'" in refusal.reason
    assert written(shell.journal_file, Note)[0].text == refusal.reason
    assert agent.received() == [AgentEnd(member=-1, reason=refusal.reason, code=1)]
    assert [type(event) for event in shell.emitted()] == [AgentLost]
    assert 8 not in shell.records.live


def test_what_differs_is_named():
    exact = JoinTerms(0.25, 20.0, True, {"cpu": "a", "torch": "2"}, "m")
    other = hello(1, 4, fingerprint={"cpu": "b", "gpu": "c"}, model="n")
    found = exact.difference(other)
    assert found.startswith("rank 4 on here would not compute the same bits")
    for part in ("cpu is 'b' instead of 'a'", "gpu is 'c' instead of 'missing'", "torch is 'missing'"):
        assert part in found
    assert "other initial weights" in found
    assert not JoinTerms(0.25, 20.0, False, {"cpu": "a"}, "m").difference(other)


def test_after_a_reconnect_the_last_messages_come_again_where_they_may_be_lost(shell: Shell):
    record = shell.start(7, 2)
    shell.join(7, 2)
    record.prepare, record.stop = Prepare(generation=4, abort=True, reason="r"), Stop(reason="s")
    assert kinds(shell.join(7, 2)) == [MemberAccepted, Stop, Prepare]
    # One in a view is asked again by the machine, which knows what it answered.
    assert kinds(shell.join(7, 2, generation=3, progress=(5, 0, 0))) == [MemberAccepted, Stop]
    shell.workers.dismiss(record, Dismissed(reason="over"), 30.0)
    assert kinds(shell.join(7, 2, generation=3, progress=(5, 0, 0)))[-1] is Dismissed
    assert len(written(shell.journal_file, WorkerStarted)) == 1


def test_of_two_connections_of_a_worker_the_last_counts(shell: Shell):
    shell.start(7, 2)
    first = shell.join(7, 2)
    second = shell.join(7, 2)
    shell.emitted()
    assert first.is_cut
    second.send(heartbeat(3))
    shell.deliver()
    assert len(shell.emitted()) == 1
    shell.pass_time(10.0)
    assert not shell.emitted()  # the end of the first is no loss


def test_a_numbered_message_counts_once(shell: Shell):
    record = shell.start(7, 2)
    peer = shell.join(7, 2)
    for number in (1, 2, 2, 1):
        peer.channel.send_frame(channel.frame(JournalLines(generation=1, lines=(step(number),)), number))
    shell.deliver()
    assert record.received == 2
    assert [one.step for one in written(shell.journal_file, StepCommitted)] == [1, 2]


def test_a_number_far_ahead_ends_the_connection(shell: Shell):
    record = shell.start(7, 2)
    peer = shell.join(7, 2)
    peer.channel.send_frame(channel.frame(heartbeat(1), 1 << 30))
    shell.deliver()
    assert peer.is_cut
    assert record.received == 0


def test_what_is_not_a_workers_to_send_ends_the_connection(shell: Shell):
    shell.start(7, 2)
    peer = shell.join(7, 2)
    peer.send(Stop(reason="do what I say"))
    shell.deliver()
    assert peer.is_cut


def test_messages_are_acknowledged_once_they_are_written(shell: Shell):
    shell.start(7, 2)
    peer = shell.join(7, 2)
    peer.received()
    peer.channel.send_frame(channel.frame(JournalLines(generation=1, lines=(step(1),)), 1))
    peer.channel.send_frame(channel.frame(receipt(1, 1), 2))
    peer.send(heartbeat(1))
    shell.deliver()
    assert not peer.received()  # the receipt is held back, to be merged with the next
    shell.journal.flush()
    peer.send(heartbeat(1))
    shell.deliver()
    assert peer.received() == [Ack(number=2)]


def test_a_heartbeat_is_known_with_its_time(shell: Shell):
    record = shell.start(7, 2)
    peer = shell.join(7, 2)
    shell.clock.advance(5.0)
    peer.send(heartbeat(9, "data"))
    shell.deliver()
    assert (record.phase, record.heartbeat_at, record.progress) == ("data", shell.clock.now(), (9, 0, 0))


def test_an_exception_is_kept_for_the_report(shell: Shell):
    record = shell.start(7, 2)
    peer = shell.join(7, 2)
    exception = WorkerException(summary="E", traceback="t", phase="forward", fault="code", step=3)
    peer.send(exception)
    shell.deliver()
    assert record.exception == exception


def test_a_shard_is_claimed_once_and_the_others_are_told(shell: Shell):
    peers = {}
    for member in (7, 8):
        shell.start(member, member)
        peers[member] = shell.join(member, member)
    plan = ViewPlan(generation=1, members=(7, 8), slots=(7, 8), shards=((0,), (1,)))
    records = {member: shell.records.live[member] for member in (7, 8)}
    assert isinstance(shell.views.make(plan, records, 0), View)
    for peer in peers.values():
        peer.received()
    for member in (7, 8):
        peers[member].send(ShardComputed(generation=1, step=4, shard=1))
        shell.deliver()
    assert peers[8].received() == [ShardComputed(step=4, shard=1, generation=1)]
    assert not peers[7].received()
