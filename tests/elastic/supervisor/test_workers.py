"""Workers' processes and records, with socket pairs for fork servers: started, joined, cut off, ended."""

from __future__ import annotations

import os
import signal

import pytest
from tests.elastic.supervisor.shell_parts import Shell, ended, receipt, written

from paceline.control.messages import (
    Ack,
    AgentEnd,
    AgentStart,
    Dismissed,
    Stop,
    WorkerException,
    WorkerExited,
)
from paceline.control.spool import START_OVER_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE
from paceline.control.worker_options import WorkerOptions
from paceline.core import fd_messages
from paceline.core.errors import ResourceError, UsageError
from paceline.core.events import StepsReceived
from paceline.elastic.machine.machine_events import AgentLost, FromMember, MachineEvent, WorkerLost
from paceline.elastic.supervisor.worker_exits import exit_reason
from paceline.elastic.supervisor.worker_record import WorkerRecord, WorkerRecords
from paceline.elastic.supervisor.workers import RECONNECT_SECONDS, WorkerLauncher
from paceline.engines.local import engine_messages, failure_report, memfd_pickle
from paceline.engines.local.engine_messages import EngineMessage, LaunchOrder


def lost(shell: Shell) -> list[WorkerLost]:
    return [event for event in shell.emitted() if isinstance(event, WorkerLost)]


def exception_of(event: MachineEvent) -> WorkerException:
    assert isinstance(event, FromMember)
    assert isinstance(event.message, WorkerException)
    return event.message


def test_a_worker_gets_its_slot_member_and_attempt(shell: Shell):
    shell.workers.start(7, 2, 0)
    shell.workers.start(8, 2, 0)
    orders = [order for order, _ in shell.started]
    options = [WorkerOptions.from_plain(order.options) for order in orders]
    assert [(one.member, one.slot, one.attempt) for one in options] == [(7, 2, 1), (8, 2, 2)]
    assert options[0].chaos == "none"
    assert (orders[0].first_rank, orders[0].world_size, orders[0].workers) == (2, 4, 1)
    assert orders[0].outlives_parent
    assert orders[0].outlives_server
    assert [kind for kind, _ in shell.to_parent()] == ["keep", "keep"]


def test_a_process_that_cannot_be_started_is_lost_at_once(shell: Shell, monkeypatch: pytest.MonkeyPatch):
    def refuse(launcher: WorkerLauncher, member: int, slot: int, attempt: int) -> None:
        raise ResourceError("no process is left")

    monkeypatch.setattr(WorkerLauncher, "launch", refuse)
    shell.workers.start(7, 2, 0)
    (event,) = lost(shell)
    assert (event.member, event.kind) == (7, "exit")
    assert "no process is left" in event.reason
    assert not shell.records.live


@pytest.mark.parametrize(
    ("status", "kind", "reason"),
    [
        (3, "exit", "exited with code 3"),
        (-signal.SIGSEGV, "crash", "signal 11 (SIGSEGV)"),
        (-signal.SIGTERM, "preempted", "signal 15 (SIGTERM)"),
        (START_OVER_EXIT_CODE, "restart", "starts over"),
    ],
)
def test_an_exit_status_is_a_kind_of_failure(shell: Shell, status: int, kind: str, reason: str):
    shell.start(7, 2)
    ended(shell.started[0][1], status)
    shell.deliver()
    (event,) = lost(shell)
    assert (event.member, event.kind) == (7, kind)
    assert reason in event.reason
    assert shell.to_parent()[-1] == ("drop", {"member": 7})
    assert shell.records.find(7).slot == 2  # known still, for reports


def test_a_signal_without_a_name_is_a_number():
    assert exit_reason(-63) == ("crash", "the process was killed by signal 63")


def test_a_dismissed_worker_ends_without_a_failure(shell: Shell):
    record = shell.start(7, 2)
    peer = shell.join(7, 2)
    shell.emitted()
    shell.workers.dismiss(record, Dismissed(reason="the run is over"), 30.0)
    assert Dismissed(reason="the run is over") in peer.received()
    ended(shell.started[0][1], 0)
    shell.deliver()
    assert not shell.emitted()


def test_receipts_of_a_dismissed_worker_are_written_before_it_ends(shell: Shell):
    record = shell.start(7, 2)
    shell.journal.add_receipt(2, os.getpid(), receipt(1, 3))
    shell.workers.dismiss(record, Dismissed(reason="it leaves"), 30.0)
    assert [one.last for one in written(shell.journal_file, StepsReceived)] == [3]


def test_a_dismissed_worker_that_does_not_end_is_killed(shell: Shell, killed):
    record = shell.start(7, 2)
    shell.workers.dismiss(record, Dismissed(reason="it leaves"), 30.0)
    shell.pass_time(29.9)
    assert not killed
    shell.pass_time(0.2)
    assert killed == [record.process]
    shell.pass_time(100.0)
    assert len(killed) == 1


def test_a_connection_that_comes_back_in_time_is_no_loss(shell: Shell):
    shell.start(7, 2)
    peer = shell.join(7, 2)
    peer.channel.close()
    shell.deliver()
    shell.pass_time(0.9 * RECONNECT_SECONDS)
    shell.join(7, 2)
    shell.pass_time(10.0)
    assert not lost(shell)


def test_a_connection_that_stays_closed_is_one_loss(shell: Shell):
    shell.start(7, 2)
    peer = shell.join(7, 2)
    peer.received()
    peer.channel.close()
    shell.deliver()
    shell.pass_time(0.9 * RECONNECT_SECONDS)
    assert not lost(shell)
    shell.pass_time(0.2 * RECONNECT_SECONDS)
    (event,) = lost(shell)
    assert (event.kind, event.member) == ("silent", 7)
    assert "the other end closed the connection" in event.reason
    shell.pass_time(10.0)
    assert not lost(shell)
    assert 7 in shell.records.live  # its process runs; the machine decides


def test_a_failure_report_tells_more_than_the_exit_status(shell: Shell):
    shell.start(7, 2)
    try:
        raise UsageError("the data is empty", remedy="give data")
    except UsageError as error:
        files = memfd_pickle.dump(failure_report.describe(error)), memfd_pickle.dump(error)
    engine_messages.send(shell.started[0][1], EngineMessage(engine_messages.FAILED, descriptors=files))
    fd_messages.close_all(files)
    ended(shell.started[0][1], 1)
    shell.deliver()
    (event,) = shell.emitted()
    assert "the data is empty" in exception_of(event).summary
    assert memfd_pickle.load(shell.workers.exits.failures[7][1]).message == "the data is empty"


def test_a_refused_start_is_the_users_mistake_where_it_is(shell: Shell):
    for member, error in ((7, UsageError("no such module")), (8, ResourceError("no memory"))):
        shell.workers.start(member, member, 0)
        file = memfd_pickle.dump(error)
        message = EngineMessage(engine_messages.REFUSED, descriptors=(file,))
        engine_messages.send(shell.started[-1][1], message)
        os.close(file)
    shell.deliver()
    first, second = shell.emitted()
    assert exception_of(first).fault == "user"
    assert isinstance(second, WorkerLost)
    assert second.kind == "exit"


def test_results_count_only_while_the_job_ends(shell: Shell):
    for member in (7, 8):
        shell.start(member, member)
        result = memfd_pickle.dump(member)
        sock = shell.started[-1][1]
        engine_messages.send(sock, EngineMessage(engine_messages.RETURNED, descriptors=(result,)))
        os.close(result)
        if member == 8:
            shell.workers.exits.keep_results = True
        ended(sock, 0)
        shell.deliver()
    assert list(shell.workers.exits.results) == [8]


def test_an_adopted_worker_goes_on_under_its_number(shell: Shell):
    process, _ = shell.process()
    kept = {7: (os.getpid(), tuple(os.dup(file) for file in process.descriptors()))}
    shell.workers.adopt({7: (2, 0)}, {7: (os.getpid(), "here")}, kept)
    assert not kept
    record = shell.records.live[7]
    assert (record.slot, record.pid, record.hostname, record.inherited) == (2, os.getpid(), "here", True)
    shell.join(7, 2, generation=3, progress=(5, 0, 0))
    shell.workers.start(9, 2, 0)
    assert WorkerOptions.from_plain(shell.started[-1][0].options).attempt == 2


def test_a_worker_that_left_while_no_supervisor_ran_is_not_at_fault(shell: Shell):
    process, theirs = shell.process()
    kept = {7: (0, tuple(os.dup(file) for file in process.descriptors()))}
    shell.workers.adopt({7: (2, 0), 8: (3, 0)}, {}, kept)
    ended(theirs, SUPERVISOR_LOST_EXIT_CODE)
    shell.deliver()
    crashed, left = lost(shell)
    assert (crashed.member, crashed.kind) == (8, "crash")  # its socket was not kept
    assert (left.member, left.kind) == (7, "unattended")
    assert shell.spool_imports == 1  # before the machine decides about it


def test_workers_of_an_agent_start_and_end_there(shell: Shell):
    agent = shell.agent()
    agent.received()
    shell.workers.start(7, 2, 1)
    (start,) = agent.received()
    assert isinstance(start, AgentStart)
    assert (start.member, start.slot, start.attempt) == (7, 2, 1)
    shell.workers.kill(shell.records.live[7], "it hangs")
    assert agent.received() == [AgentEnd(member=7, reason="it hangs")]
    shell.emitted()
    other = shell.agent()
    other.send(WorkerExited(member=7, status=-9, reason="killed"))  # not a worker of its machine
    shell.deliver()
    assert 7 in shell.records.live
    agent.send(WorkerExited(member=7, status=-9, reason="killed by the kernel", memory=True))
    shell.deliver()
    (event,) = lost(shell)
    assert (event.kind, event.reason) == ("memory", "killed by the kernel")


def test_a_worker_for_an_agent_that_is_gone_is_preempted(shell: Shell):
    shell.workers.start(7, 2, 5)
    (event,) = lost(shell)
    assert event.kind == "preempted"


def test_when_agent_and_worker_are_cut_off_the_machine_is_gone(shell: Shell):
    agent = shell.agent()
    shell.workers.start(7, 2, 1)
    worker = shell.join(7, 2)
    agent.channel.close()
    worker.channel.close()
    shell.deliver()
    shell.emitted()
    shell.pass_time(1.1 * RECONNECT_SECONDS)
    assert [type(event) for event in shell.emitted()] == [AgentLost]
    assert not shell.records.live


def test_one_message_to_many_and_what_is_kept_for_those_without_a_connection(shell: Shell):
    shell.start(7, 2)
    shell.start(8, 3)
    peer = shell.join(7, 2)
    peer.received()
    stop = Stop(reason="enough")
    assert [record.member for record in shell.records.send((7, 8, 99), stop)] == [7, 8]
    assert peer.received() == [stop]


def test_former_workers_are_forgotten_at_last():
    records = WorkerRecords()
    for member in range(600):
        records.live[member] = WorkerRecord(member, member % 4)
        records.retire(records.live[member])
    assert records.find(599).slot == 3
    assert records.find(0).slot == -1


def test_a_message_is_acknowledged_once(shell: Shell):
    record = shell.start(7, 2)
    peer = shell.join(7, 2)
    peer.received()
    record.received = 5
    shell.records.ack_process((2, os.getpid()))
    shell.records.ack_process((2, os.getpid()))
    assert peer.received() == [Ack(number=5)]


def test_an_order_leaves_the_engine_as_it_is(shell: Shell):
    """The launcher adds to the order what belongs to one worker, and nothing else."""
    shell.workers.start(7, 2, 0)
    order = shell.started[0][0]
    assert isinstance(order, LaunchOrder)
    assert (order.entry, order.threads, order.environ) == ("tests:none", 1, {})
