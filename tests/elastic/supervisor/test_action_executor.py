"""The machine's actions carried out: messages, journal lines and processes."""

from __future__ import annotations

import os

import pytest
from tests.elastic.supervisor.shell_parts import Shell, receipt, step, written

from paceline.control.messages import AgentNotice, DialRequest, Dismissed, Prepare, Stop, View, ViewPlan
from paceline.core.events import Repaired, StepsReceived, ViewChanged, WorkerFailed
from paceline.elastic.machine.actions import (
    EndJob,
    InstallView,
    KillWorker,
    RecordFailure,
    RecordRepair,
    RecordVerdict,
    RejectAgent,
    RequestDial,
    Send,
    StartWorker,
    dismiss,
)
from paceline.elastic.machine.machine_events import AgentLost
from paceline.elastic.supervisor.action_executor import DISMISSED_SECONDS
from paceline.elastic.supervisor.process_probe import MAX_STACK_SECONDS, PROBE_POLL_SECONDS

PLAN = ViewPlan(
    generation=3, members=(7, 8), slots=(0, 1), shards=((0, 1), (2,)), source=0, stale_indexes=(1,)
)


def test_a_view_goes_to_all_members_and_to_the_journal(shell: Shell):
    peers = []
    for member, slot, done in ((7, 0, 4), (8, 1, 2)):
        shell.executor.execute(StartWorker(member, slot), set())
        peers.append(shell.join(member, slot, progress=(done, 0, 0), host=f"h{slot}"))
        peers[-1].received()
    shell.journal.add_lines([step(1)])
    shell.journal.add_receipt(0, os.getpid(), receipt(1, 1))
    shell.executor.execute(InstallView(PLAN, "rank 1 joins"), set())
    (view,) = peers[0].received()
    assert isinstance(view, View)
    assert peers[1].received() == [view]
    assert (view.generation, view.slots, view.shards, view.source) == (3, (0, 1), ((0, 1), (2,)), 0)
    assert (view.stale_indexes, view.journaled, view.segment) == ((1,), 1, ())
    assert shell.records.live[7].view == view
    (changed,) = written(shell.journal_file, ViewChanged)
    assert (changed.generation, changed.members, changed.behind) == (3, [0, 1], [1])
    assert changed.step == 4  # what the source has committed
    assert changed.reason == "rank 1 joins"
    assert written(shell.journal_file, StepsReceived)  # of the view before


def test_members_of_one_host_share_a_segment_until_all_have_opened_it(shell: Shell):
    from paceline.core.host import host_identity

    for member, slot in ((7, 0), (8, 1)):
        shell.start(member, slot)
        shell.join(member, slot, host=host_identity())
    shell.executor.execute(InstallView(PLAN, "r"), set())
    view = shell.views.latest
    assert view is not None
    pid, descriptor, inode, _ = view.segment
    assert pid == os.getpid()
    assert os.fstat(descriptor).st_ino == inode
    shell.views.installed(7, 2)  # of an old view
    shell.views.installed(7, 3)
    assert os.fstat(descriptor).st_ino == inode
    shell.views.installed(8, 3)
    assert not shell.views.waiting
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_kill_waits_for_the_verdict_and_ends_what_the_worker_says(shell: Shell, killed):
    record = shell.start(7, 2)
    verdict = RecordVerdict(7, 2, "data", "it hangs", "", "it is replaced")
    shell.executor.execute(verdict, {7})
    shell.executor.execute(KillWorker(7, "it hangs"), {7})
    assert record.expelled
    assert not killed
    # The process is this test's, which runs: its stack has the time that one on an overloaded host has.
    shell.pass_time(MAX_STACK_SECONDS + 2 * PROBE_POLL_SECONDS)
    assert killed == [record.process]
    shell.executor.execute(KillWorker(99, "not there"), set())


def test_a_worker_that_raised_ends_by_itself(shell: Shell, killed):
    from paceline.control.messages import WorkerException

    record = shell.start(7, 2)
    record.exception = WorkerException(summary="E", traceback="t", phase="data")
    shell.executor.execute(KillWorker(7, "it raised"), set())
    assert not killed
    shell.pass_time(10.1)
    assert killed == [record.process]


def test_what_was_sent_last_is_kept_for_a_reconnect(shell: Shell):
    record = shell.start(7, 0)
    peer = shell.join(7, 0)
    peer.received()
    prepare, stop = Prepare(generation=4, abort=False, reason="r"), Stop(reason="s")
    for message in (prepare, stop):
        shell.executor.execute(Send((7, 99), message), set())
    assert peer.received() == [prepare, stop]
    assert (record.prepare, record.stop) == (prepare, stop)
    shell.executor.execute(dismiss(7, "over"), set())
    assert peer.received() == [Dismissed(reason="over")]
    assert record.exit_by == shell.clock.now() + DISMISSED_SECONDS


def test_a_worker_that_the_machine_has_forgotten_can_be_dismissed(shell: Shell):
    record = shell.start(7, 0)
    peer = shell.join(7, 0)
    peer.received()
    shell.executor.execute(dismiss(99, "not needed"), set())
    assert peer.received() == []
    assert shell.records.live == {7: record}


def test_peers_dial_each_other_in_both_directions(shell: Shell):
    peers = {}
    for member, slot in ((7, 0), (8, 1), (9, 2)):
        shell.start(member, slot)
        peers[member] = shell.join(member, slot, endpoint=(f"10.0.0.{member}", 5))
        peers[member].received()
    shell.executor.execute(RequestDial(9, (7, 8, 99)), set())
    asked = DialRequest(peers=((7, 0, "10.0.0.7", 5), (8, 1, "10.0.0.8", 5)))
    assert peers[9].received() == [asked]
    for member in (7, 8):
        assert peers[member].received() == [DialRequest(peers=((9, 2, "10.0.0.9", 5),))]
    shell.executor.execute(RequestDial(99, (7,)), set())
    assert not peers[7].received()


def test_a_machine_that_cannot_be_reached_is_told_what_to_try(shell: Shell, capfd):
    agent = shell.agent()
    shell.workers.start(7, 2, 1)
    shell.join(7, 2)
    agent.received()
    shell.executor.execute(RecordFailure(7, 2, "wait", "unreachable", "rank 0 cannot connect"), set())
    (notice,) = agent.received()
    assert isinstance(notice, AgentNotice)
    assert "rank 0 cannot connect" in notice.text
    assert "--ports" in notice.text
    assert "rank 2" in capfd.readouterr().err
    shell.executor.execute(RecordFailure(7, 2, "wait", "hung", "it hangs"), {7})
    assert not capfd.readouterr().err  # the verdict shows it
    assert len(written(shell.journal_file, WorkerFailed)) == 1  # a process fails once


def test_a_rejected_machine_is_lost_with_its_workers(shell: Shell):
    shell.agent()
    shell.workers.start(7, 2, 1)
    shell.emitted()
    shell.executor.execute(RejectAgent(1, "no room"), set())
    assert shell.emitted() == [AgentLost(1, "no room")]
    assert not shell.records.live


def test_a_repair_is_written(shell: Shell):
    shell.executor.execute(RecordRepair(3, 0.25, (1,)), set())
    (repaired,) = written(shell.journal_file, Repaired)
    assert (repaired.generation, repaired.seconds, repaired.lost) == (3, 0.25, [1])


def test_the_end_is_not_an_action_among_others(shell: Shell):
    with pytest.raises(AssertionError):
        shell.executor.execute(EndJob(ok=True, reason="finished"), set())
