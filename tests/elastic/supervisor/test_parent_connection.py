"""The supervisor's connection to its parent: requests, kept workers, and a parent that is gone."""

from __future__ import annotations

import os

from tests.elastic.supervisor.shell_parts import Shell

from paceline.core import fd_messages
from paceline.elastic.machine.machine_events import ScaleRequested, StopRequested
from paceline.elastic.supervisor import parent_messages
from paceline.elastic.supervisor.parent_messages import JobOutcome, pack_outcome, unpack_outcome
from paceline.engines.local import memfd_pickle


def test_requests_become_events(shell: Shell):
    parent_messages.send(shell.parent_end, "stop", reason="enough")
    parent_messages.send(shell.parent_end, "scale", workers=3)
    shell.deliver()
    assert shell.emitted() == [StopRequested("enough"), ScaleRequested(3)]
    parent_messages.send(shell.parent_end, "kill", reason="killed by the caller")
    shell.deliver()
    assert shell.loop.kill_reason == "killed by the caller"
    assert not shell.emitted()


def test_when_the_parent_is_gone_the_job_stops_and_is_killed_after_a_while(shell: Shell):
    shell.parent_end.close()
    shell.deliver()
    assert shell.emitted() == [StopRequested("the calling process is gone")]
    shell.parent.send("up", port=1)  # into the void
    shell.pass_time(19.9)
    assert not shell.loop.kill_reason
    shell.pass_time(0.2)
    assert "20 s were not enough" in shell.loop.kill_reason
    shell.pass_time(100.0)
    assert not shell.emitted()


def test_a_parent_that_does_not_read_gets_all_in_order_later_but_for_workers_that_ended(shell: Shell):
    for number in range(2000):
        shell.parent.send("note", number=number)
    process, _ = shell.process()
    shell.parent.keep(7, process)
    shell.parent.keep(8, process)
    shell.parent.drop(7)
    found = shell.to_parent()
    assert len(found) < 2000  # the rest waits
    shell.deliver()
    while more := shell.to_parent():
        found += more
        shell.deliver()
    assert [fields["number"] for kind, fields in found if kind == "note"] == list(range(2000))
    assert [(kind, fields["member"]) for kind, fields in found[2000:]] == [("keep", 8), ("drop", 7)]


def test_an_outcome_travels_with_its_files():
    result, report = memfd_pickle.dump("weights"), memfd_pickle.dump("report")
    for outcome in (
        JobOutcome(ok=True, reason="finished", result=result),
        JobOutcome(ok=False, reason="raised", failure=(report, result), rank=2, pid=11, text="t"),
        JobOutcome(ok=False, reason="asked", stopped="asked"),
    ):
        packed = pack_outcome(outcome)
        copies = [os.dup(descriptor) for descriptor in packed]
        os.close(packed[0])
        found = unpack_outcome(copies)
        assert (found.ok, found.reason, found.stopped, found.rank) == (
            outcome.ok,
            outcome.reason,
            outcome.stopped,
            outcome.rank,
        )
        read = [memfd_pickle.load(descriptor) for descriptor in found.descriptors]
        assert read == [memfd_pickle.load(descriptor) for descriptor in outcome.descriptors]
        fd_messages.close_all(found.descriptors)
    fd_messages.close_all([result, report])
