"""What a run reports while it computes steps, without a supervisor: the client keeps what is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from tests.control.member_driver import ME, abort, prepare, view
from tests.train.member.unconnected_worker import Worker
from tests.virtual_clock import VirtualClock

from paceline.control.messages import ShardComputed, StepReceipt
from paceline.core.clock import Clock
from paceline.core.errors import GroupInterruptedError
from paceline.core.events import StepCommitted
from paceline.data.batch_plan import DataPosition
from paceline.train.member.fault_injection import FaultInjector
from paceline.train.member.outbox import Outbox
from paceline.train.member.step_reports import StepReports
from paceline.train.state.run_state import RunState


@pytest.fixture
def worker():
    made = Worker()
    made.in_view()
    yield made
    made.close()


def reports(worker: Worker, clock: Clock | None = None) -> StepReports:
    injector, outbox = FaultInjector(None, slot=0), Outbox(worker.client, worker.team)
    return StepReports(worker.shell, worker.client, outbox, worker.team, injector, clock)


def state(step: int, agreed: int = 0) -> RunState:
    """As much of a RunState as votes carry."""
    hashes = SimpleNamespace(recent=((step, "given"),))
    made = SimpleNamespace(position=DataPosition(step=step), agreed_step=agreed, hashes=hashes)
    made.hash = lambda: f"weights-{step}"
    return cast(RunState, made)


def committed(step: int, digest: str | None = None) -> StepCommitted:
    return StepCommitted(time=0.0, step=step, epoch=0, loss=1.0, samples=1, hash=digest)


def receipts(worker: Worker) -> list[StepReceipt]:
    return [message for message in worker.client.undelivered() if isinstance(message, StepReceipt)]


def test_a_pause_is_wanted_once_it_was_asked_for(worker):
    hooks = reports(worker)
    assert not hooks.wants_pause
    worker.shell.feed(prepare(2))
    assert hooks.wants_pause


def test_no_shard_is_begun_after_an_abort(worker):
    shards = reports(worker).shards_to_compute(1, [0, 1])
    assert next(shards) == 0
    worker.shell.feed(abort(2))
    with pytest.raises(GroupInterruptedError, match="generation 2"):
        next(shards)


def test_without_the_backup_policy_shards_are_not_announced(worker):
    clock = VirtualClock()
    hooks = reports(worker, clock)
    for _ in hooks.shards_to_compute(1, [0]):
        clock.advance(0.5)
    assert hooks.shard_seconds == 0.5
    assert not [one for one in worker.client.undelivered() if isinstance(one, ShardComputed)]


def test_with_the_backup_policy_shards_are_announced_and_skipped(worker):
    hooks = reports(worker)
    worker.team.backup = True
    assert list(hooks.shards_to_compute(1, [0])) == [0]
    assert worker.client.undelivered()[-1] == ShardComputed(generation=1, step=1, shard=0)
    assert list(hooks.shards_to_compute(1, [0])) == []


def test_receipts_of_audited_steps_are_sent_at_once(worker):
    hooks = reports(worker)
    hooks.committed(state(1), committed(1), (0,), {})
    assert receipts(worker) == []
    hooks.committed(state(2), committed(2, "abc"), (0,), {0: "x"})
    (receipt,) = receipts(worker)
    assert (receipt.first, receipt.last, receipt.hashes) == (1, 2, {"2": "abc"})


def test_a_difference_is_a_vote_and_ends_the_step(worker):
    with pytest.raises(GroupInterruptedError, match="after step 7 are not the same"):
        reports(worker).replicas_differ(state(7, agreed=5), "sample:a")
    (vote,) = receipts(worker)
    assert (vote.hashes, vote.agreed, vote.first, vote.last) == ({"7": "sample:a"}, 5, 1, 0)
    assert vote.trail == state(7).hashes.recent


def test_an_interrupted_comparison_is_a_vote_too(worker):
    reports(worker).comparison_interrupted(state(7), "end:a")
    (vote,) = receipts(worker)
    assert (vote.hashes, vote.agreed) == ({"7": "end:a"}, -1)


@pytest.mark.parametrize(("disputed", "votes"), [(7, 1), (8, 0), (-1, 0)])
def test_agreement_is_a_vote_only_where_the_step_is_disputed(disputed, votes):
    made = Worker()
    made.in_view(view(1, members=(ME,), restore=True, disputed=disputed))
    reports(made).replicas_agree(state(7), "sample:a")
    assert len(receipts(made)) == votes
    made.close()


def test_a_disputed_step_is_voted_on_with_the_weights_before_its_receipt():
    made = Worker()
    made.in_view(view(1, members=(ME,), restore=True, disputed=7))
    reports(made).committed(state(7), committed(7, "abc"), (0,), {})
    assert [one.hashes for one in receipts(made)] == [{"7": "report:weights-7"}, {"7": "abc"}]
    made.close()
