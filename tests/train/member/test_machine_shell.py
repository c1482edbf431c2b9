"""The shell of the member machine without a supervisor: a client that is not connected keeps what is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from tests.control.member_driver import ME, abort, accepted, failure, finished, prepare, view
from tests.train.member.unconnected_worker import ALONE, Worker, alone
from tests.waiting import wait_for

from paceline.control import supervisor_address
from paceline.control.control_client import ControlHandler
from paceline.control.member_state import (
    Exit,
    GroupLeft,
    MemberPhase,
    RunFinished,
    SendReport,
)
from paceline.control.messages import Dismissed, Stop, ViewInstalled
from paceline.core.errors import GroupInterruptedError, RendezvousError
from paceline.testing.thread_transport import run_ranks
from paceline.train.phases import COLLECTIVE

NOTHING_TO_SAY = cast(ControlHandler, SimpleNamespace(supervisor_away=lambda: None))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def test_the_way_into_a_view(worker):
    worker.in_view()
    assert worker.team.generation == 1
    assert worker.shell.state.phase is MemberPhase.IN_VIEW
    assert worker.client.undelivered() == [ViewInstalled(generation=1, progress=(0, 0, 0))]


def test_an_abort_ends_what_the_training_thread_waits_for(worker):
    worker.in_view()
    worker.shell.check()
    worker.shell.feed(abort(2))
    with pytest.raises(GroupInterruptedError, match="generation 2"):
        worker.shell.check()
    with pytest.raises(GroupInterruptedError, match="generation 2"):
        worker.team.context.barrier()
    worker.shell.feed(GroupLeft(failure(1)))
    assert worker.shell.next_action() == SendReport(2)
    worker.shell.check()


def test_an_abort_cancels_the_opening_of_a_view(worker):
    worker.shell.feed(accepted())
    worker.shell.feed(ALONE)
    assert not worker.shell.cancelled.is_set()
    worker.shell.feed(abort(2))
    assert worker.shell.cancelled.is_set()
    with alone() as context, pytest.raises(GroupInterruptedError, match="generation 2"):
        worker.shell.install(context, ALONE, may_back_up=True)
    worker.shell.feed(GroupLeft(failure(1)))
    assert worker.shell.next_action() == SendReport(2)
    worker.shell.feed(view(2, members=(ME,)))
    assert not worker.shell.cancelled.is_set()


def blocked_in_transfer(worker: Worker, then) -> None:
    """Call `then` while this worker, in a view of two that it has just opened, waits for member 5."""
    pair = view(1, members=(ME, 5), restore=True)
    over = threading.Event()

    def rank(context):
        if context.rank == 1:
            assert over.wait(60)
            return
        worker.team.context.close()
        worker.shell.install(context, pair, may_back_up=True)
        with pytest.raises(GroupInterruptedError):
            context.receive(1)

    worker.shell.feed(accepted())
    worker.shell.feed(pair)
    worker.shell.next_action()
    ranks = threading.Thread(target=run_ranks, args=(2, rank))
    ranks.start()
    try:
        wait_for(worker.shell.waits_for, "the wait is not seen")
        then()
    finally:
        worker.team.context.interrupt("the test is over")
        over.set()
        ranks.join(60)


def test_heartbeats_name_the_member_that_a_state_transfer_waits_for(worker):
    """Else all members that have not installed the view look alike, and the healthy ones are expelled too."""

    def look():
        assert worker.shell.waits_for() == (5,)
        assert worker.shell.state.phase is MemberPhase.OPENING
        assert worker.phases.name == COLLECTIVE

    blocked_in_transfer(worker, look)


def test_an_orphan_that_is_blocked_in_a_state_transfer_is_interrupted():
    worker = Worker(patience=0.0)

    def look():
        worker.shell.tick()
        with pytest.raises(GroupInterruptedError, match="stayed away"):
            worker.shell.check()

    blocked_in_transfer(worker, look)
    worker.close()


def test_what_was_due_in_a_group_is_dropped_with_it(worker):
    """An interrupt between the opening of a view and the transfer of its state: no state is touched."""
    worker.shell.feed(accepted())
    worker.shell.feed(ALONE)
    worker.shell.next_action()
    worker.shell.install(alone(), ALONE, may_back_up=True)
    worker.shell.feed(abort(2))
    worker.shell.feed(GroupLeft(failure(1)))
    assert worker.shell.next_action() == SendReport(2)


def test_a_dismissal_survives_the_group(worker):
    worker.in_view()
    worker.shell.feed(Dismissed(reason="no longer needed", code=3))
    worker.shell.feed(GroupLeft(failure(1)))
    assert worker.shell.next_action() == Exit("no longer needed", 3)


def test_a_stop_is_asked_for(worker):
    worker.shell.feed(Stop(reason="enough"))
    assert worker.stop.reason == "enough"


def test_the_training_thread_is_woken(worker):
    worker.shell.feed(accepted())
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(worker.shell.next_action()))
    waiting.start()
    worker.shell.feed(prepare(5))
    waiting.join(30)
    assert found == [SendReport(5)]


def test_a_worker_that_waits_without_a_supervisor_leaves():
    worker = Worker(patience=0.05)
    worker.shell.feed(accepted())
    action = worker.shell.next_action()
    assert isinstance(action, Exit)
    assert action.orphaned
    worker.close()


def test_a_finished_worker_without_a_supervisor_leaves():
    worker = Worker(patience=0.05)
    worker.in_view()
    worker.shell.feed(RunFinished(finished(1)))
    action = worker.shell.next_action()
    assert isinstance(action, Exit)
    assert action.orphaned
    worker.close()


def test_an_orphan_that_trains_stops_with_its_group():
    worker = Worker(patience=0.0)
    worker.in_view()
    worker.phases.enter(COLLECTIVE)
    worker.shell.tick()
    assert "stayed away" in (worker.stop.reason or "")
    assert worker.shell.waits_for() == ()
    worker.shell.check()
    worker.close()


def test_a_worker_of_an_earlier_start_gives_its_supervisor_up(tmp_path):
    worker = Worker(tmp_path)
    worker.shell.tick()
    # The folder has no secret any longer.
    with pytest.raises(RendezvousError, match="was not accepted"):
        worker.client.start(NOTHING_TO_SAY, 60.0)
    worker.close()


def test_a_worker_of_this_start_looks_on_for_its_supervisor(tmp_path):
    supervisor_address.write_secret(tmp_path, b"s" * 32)
    worker = Worker(tmp_path)
    worker.shell.tick()
    with pytest.raises(RendezvousError, match="did not accept this worker"):
        worker.client.start(NOTHING_TO_SAY, 0.1)
    worker.close()
