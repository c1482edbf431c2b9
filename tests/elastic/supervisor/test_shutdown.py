"""The end of a job: workers are dismissed, waited for, killed; then the outcome is put together."""

from __future__ import annotations

import pytest
from tests.elastic.supervisor.shell_parts import Shell, ended

from paceline.control.messages import Dismissed
from paceline.elastic.machine.actions import EndJob
from paceline.elastic.supervisor.workers import (
    CLEAN_EXIT_SECONDS,
    FAILED_EXIT_SECONDS,
    Shutdown,
    job_outcome,
)
from paceline.engines.local import memfd_pickle


def begin(shell: Shell, *, ok: bool = True, at_once: bool = False) -> Shutdown:
    end = EndJob(ok=ok, reason="finished" if ok else "raised")
    return Shutdown(end, shell.records, shell.workers, shell.clock, at_once=at_once)


def test_members_are_dismissed_and_those_that_have_not_joined_are_killed(shell: Shell, killed):
    shell.start(7, 2)
    late = shell.start(8, 3)
    peer = shell.join(7, 2)
    shutdown = begin(shell)
    assert Dismissed(reason="finished") in peer.received()
    assert killed == [late.process]
    shutdown.tick(shell.clock.now())
    assert not shutdown.over
    for _, sock in shell.started:
        ended(sock, 0)
    shell.deliver()
    shutdown.tick(shell.clock.now())
    assert shutdown.over


@pytest.mark.parametrize(("ok", "seconds"), [(True, CLEAN_EXIT_SECONDS), (False, FAILED_EXIT_SECONDS)])
def test_a_worker_that_does_not_end_is_killed_and_not_waited_for_for_ever(
    shell: Shell, killed, ok: bool, seconds: float
):
    shell.start(7, 2)
    shell.join(7, 2)
    shutdown = begin(shell, ok=ok)
    shell.clock.advance(seconds - 0.1)
    shutdown.tick(shell.clock.now())
    assert not killed
    shell.clock.advance(0.2)
    shutdown.tick(shell.clock.now())
    assert len(killed) == 1
    assert not shutdown.over
    shell.clock.advance(shutdown.due - shell.clock.now())
    shutdown.tick(shell.clock.now())
    assert shutdown.over  # it waits for the kernel: the fork server reaps it


def test_at_once_kills_without_a_word(shell: Shell, killed):
    shell.start(7, 2)
    peer = shell.join(7, 2)
    peer.received()
    shutdown = begin(shell, ok=False, at_once=True)
    shutdown.tick(shell.clock.now())
    assert len(killed) == 1
    assert not peer.received()


def test_a_worker_of_another_machine_that_is_cut_off_is_not_waited_for(shell: Shell):
    shell.agent()
    shell.workers.start(7, 2, 1)
    shutdown = begin(shell)
    shutdown.tick(shell.clock.now())
    assert shutdown.over


def test_the_result_is_that_of_the_first_member_of_the_view_that_returned_one(shell: Shell):
    exits = shell.workers.exits
    exits.results.update({8: (memfd_pickle.dump("eight"),), 9: (memfd_pickle.dump("nine"),)})
    outcome = job_outcome(EndJob(ok=True, reason="finished"), (7, 9, 8), shell.records, exits, "shown")
    assert outcome.result == exits.results[9][0]
    assert (outcome.ok, outcome.text, outcome.failure) == (True, "", None)
    outcome = job_outcome(EndJob(ok=True, reason="finished"), (), shell.records, exits, "")
    assert outcome.result == exits.results[8][0]


def test_a_failure_names_the_worker_and_brings_its_report(shell: Shell):
    exits = shell.workers.exits
    exits.failures[7] = memfd_pickle.dump("report"), memfd_pickle.dump("exception")
    exits.results[7] = (memfd_pickle.dump("no result"),)
    shell.start(7, 2)
    end = EndJob(ok=False, reason="raised", failed=7)
    outcome = job_outcome(end, (7,), shell.records, exits, "rank 2 raised")
    assert outcome.result is None
    assert outcome.failure == exits.failures[7]
    assert (outcome.rank, outcome.text) == (2, "rank 2 raised")
    outcome = job_outcome(EndJob(ok=False, reason="r", failed=99), (), shell.records, exits, "")
    assert outcome.failure is None
