"""The way of a member from view to view, and out of the run: the real run and machine, and no supervisor."""

from __future__ import annotations

import os

import pytest
from tests.control.member_driver import abort, accepted, prepare
from tests.train.member.small_member import SHARDS, STEPS, alone_in, member
from tests.train.member.unconnected_worker import SECRET

from paceline.control import spool, supervisor_address
from paceline.control.member_state import MemberPhase
from paceline.control.messages import (
    CollectiveFailed,
    Dismissed,
    JournalLines,
    LeaveRequest,
    MemberFinished,
    MemberReport,
    StepReceipt,
    ViewInstalled,
    WorkerException,
)
from paceline.core.errors import PeerLostError, UsageError
from paceline.train import phases
from paceline.train.loop.run_hooks import GroupChangedError
from paceline.train.member.membership import OrphanedError, ReleasedError, StartOverError
from paceline.train.settings.train_config import CheckpointConfig
from paceline.train.state import resume

# A segment of shared memory that no process has: the view cannot be opened.
NO_SEGMENT = (os.getpid(), 1 << 20, 1, 1)


# into a view


def test_the_first_view_begins_the_run_and_is_reported():
    with member() as one:
        one.join()
        assert (one.worker.team.generation, one.worker.team.block) == (1, tuple(range(SHARDS)))
        assert one.worker.shell.state.phase is MemberPhase.IN_VIEW
        assert one.sent(ViewInstalled) == [ViewInstalled(generation=1, progress=(0, 0, 0))]
        assert one.worker.phases.name == phases.COLLECTIVE
        assert one.worker.phases.longest(phases.CHECKPOINT) == 0.0


def test_a_checkpoint_is_loaded_in_its_own_phase(monkeypatch):
    """Its limit is that of a slow phase, and not that of a collective."""
    with member() as one:
        during: list[str] = []
        monkeypatch.setattr(resume, "resume", lambda *_, **__: during.append(one.worker.phases.name))
        one.join()
        assert during == [phases.CHECKPOINT]


def test_a_member_that_has_the_state_keeps_it_in_the_next_view():
    with member() as one:
        one.join()
        one.train()
        weights = one.run.state.hash()
        one.membership.receive(prepare(2))
        one.replies[MemberReport] = [alone_in(2)]
        one.membership.rejoin(None)
        assert (one.run.state.hash(), one.run.state.position.step) == (weights, STEPS)
        assert one.sent(ViewInstalled)[-1].progress == one.run.state.progress


def test_a_view_that_ends_the_run_replaces_what_was_due():
    with member() as one:
        one.join(alone_in(1, restore=True, ends="rank 2 failed"))
        assert (one.run.state.ended, one.run.state.failing) == ("rank 2 failed", True)
        assert one.run.state.agenda.concluding


@pytest.mark.parametrize(("journaled", "lines"), [(-1, 0), (1, STEPS - 1)])
def test_journal_lines_that_the_supervisor_lacks_are_sent_again(journaled, lines):
    with member() as one:
        one.join()
        one.train()
        one.membership.heartbeat()
        before = sum(len(sent.lines) for sent in one.sent(JournalLines))
        one.membership.receive(prepare(2))
        one.replies[MemberReport] = [alone_in(2, journaled=journaled)]
        one.membership.rejoin(None)
        one.membership.heartbeat()
        told = [line for sent in one.sent(JournalLines) for line in sent.lines][before:]
        assert sum('"step_committed"' in line for line in told) == lines


def test_a_worker_that_has_trained_and_finds_no_checkpoint_starts_over():
    with member() as one:
        one.join()
        one.train()
        one.membership.receive(prepare(2))
        one.replies[MemberReport] = [alone_in(2, restore=True)]
        with pytest.raises(StartOverError, match="no checkpoint"):
            one.membership.rejoin(None)


def test_a_worker_goes_back_to_its_checkpoint(tmp_path):
    saves = {"checkpoint": CheckpointConfig(every_steps=2), "max_steps": 4}
    with member(tmp_path / "run", config=saves) as one:
        one.join()
        one.membership.receive(prepare(2))
        with pytest.raises(GroupChangedError):
            one.train()
        one.run.duties.save()
        assert one.run.parts.checkpointer is not None
        one.run.parts.checkpointer.drain()
        saved = one.run.state.position.step
        one.membership.receive(accepted())
        one.replies[MemberReport] = [alone_in(2, restore=True, restore_before=saved)]
        one.membership.rejoin(None)
        assert (one.run.state.position.step, one.run.state.parent) == (saved, 1)


# out of a group


def test_a_lost_peer_is_named_before_the_report():
    with member() as one:
        one.join()
        one.train()
        one.replies = {CollectiveFailed: [abort(2)], MemberReport: [alone_in(2)]}
        one.membership.rejoin(PeerLostError("gone\nmore about it", ranks=(0,)))
        (failed,) = one.sent(CollectiveFailed)
        assert (failed.generation, failed.reason) == (1, "gone")
        kinds = one.kinds
        # The supervisor knows the receipts of the last steps when it chooses whose state counts.
        order = [kinds.index(kind) for kind in (StepReceipt, CollectiveFailed, MemberReport)]
        assert order == sorted(order)
        assert one.worker.team.generation == 2


def test_the_report_has_what_the_member_holds():
    with member() as one:
        one.join()
        computing = one.run.microbatches()
        micro = next(computing)
        one.run.backward(one.built.objective.score(one.built.call, micro.data, micro.info).loss)
        assert next(computing).shard == 1
        one.membership.receive(abort(2))
        one.replies[MemberReport] = [alone_in(2)]
        one.membership.rejoin(PeerLostError("gone"))
        (report,) = one.sent(MemberReport)
        assert (report.generation, report.progress, report.held_shards) == (2, (0, 0, 0), (0,))
        assert report.digest == f"report:{one.run.state.hash()}"
        assert one.run.parts.transaction.missing == [1]


def test_after_an_abort_the_failure_is_no_news():
    with member() as one:
        one.join()
        one.membership.receive(abort(2))
        one.replies[MemberReport] = [alone_in(2)]
        one.membership.rejoin(PeerLostError("gone"))
        assert one.sent(CollectiveFailed) == []


def test_a_view_that_cannot_be_opened_is_reported_by_its_own_number():
    """And the member comes with the next view, however often that happens."""
    with member() as one:
        one.join()
        one.membership.receive(prepare(2))
        views = [alone_in(2, segment=NO_SEGMENT), alone_in(3, segment=NO_SEGMENT), alone_in(4)]
        one.replies = {MemberReport: [*views], CollectiveFailed: [abort(3), abort(4)]}
        one.membership.rejoin(None)
        assert [failed.generation for failed in one.sent(CollectiveFailed)] == [2, 3]
        assert [report.generation for report in one.sent(MemberReport)] == [2, 3, 4]
        assert one.worker.team.generation == 4


def test_the_first_view_that_cannot_be_opened_is_no_end_either():
    with member() as one:
        one.replies = {MemberReport: [alone_in(2, restore=True)], CollectiveFailed: [abort(2)]}
        one.join(alone_in(1, restore=True, segment=NO_SEGMENT))
        assert one.worker.team.generation == 2
        (report,) = one.sent(MemberReport)
        assert (report.progress, report.digest, report.agreed) == (None, "", -1)


def test_a_member_that_is_dismissed_ends_with_its_code():
    with member() as one:
        one.join()
        one.membership.receive(Dismissed(reason="no longer needed", code=3))
        with pytest.raises(ReleasedError, match="no longer needed") as released:
            one.membership.rejoin(PeerLostError("gone"))
        assert released.value.code == 3


def test_a_member_without_a_supervisor_is_orphaned():
    with member(patience=0.0) as one:
        one.membership.receive(accepted())
        one.membership.supervisor_away()
        with pytest.raises(OrphanedError, match="stayed away"):
            one.membership.join()


# the end of the run


def test_a_finished_member_is_dismissed():
    with member() as one:
        one.join()
        one.train()
        one.replies[MemberFinished] = [Dismissed(reason="all are finished")]
        assert one.membership.finish("abc") == "dismissed"
        (message,) = one.sent(MemberFinished)
        assert (message.generation, message.progress, message.hash) == (1, one.run.state.progress, "abc")
        assert one.kinds[-1] is MemberFinished, "lines and receipts come before it"


def test_a_finished_member_whose_state_is_needed_reports_and_joins():
    with member() as one:
        one.join()
        one.train()
        one.replies = {MemberFinished: [abort(2)], MemberReport: [alone_in(2)]}
        assert one.membership.finish("abc") == "needed"
        one.membership.join()
        assert (one.worker.team.generation, one.run.state.position.step) == (2, STEPS)


def test_a_finished_member_without_a_supervisor_is_orphaned():
    with member(patience=0.0) as one:
        one.join()
        assert one.membership.finish("abc") == "orphaned"


@pytest.mark.parametrize(
    ("error", "summary", "fault"),
    [
        (ValueError("no\nsecond line"), "ValueError: no", "code"),
        (ValueError(), "ValueError: ", "code"),
        (UsageError("wrong", remedy="try"), "UsageError: wrong", "user"),
    ],
)
def test_an_exception_of_the_users_code_is_reported_in_one_line(error, summary, fault):
    with member() as one:
        one.join()
        one.membership.failed(error, "the traceback", phase="forward", holds=True)
        (told,) = one.sent(WorkerException)
        assert (told.summary, told.traceback) == (summary, "the traceback")
        assert (told.phase, told.holds) == ("forward", True)
        assert (told.fault, told.step) == (fault, one.worker.phases.step)
        assert one.worker.shell.state.phase is MemberPhase.WAITING


def test_a_signal_asks_the_supervisor_for_leave():
    with member() as one:
        one.leave.ask("SIGTERM")
        one.membership.heartbeat()
        assert one.sent(LeaveRequest) == [LeaveRequest(reason="SIGTERM")]


def test_what_no_supervisor_has_acknowledged_is_spooled(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    supervisor_address.write_secret(folder, SECRET)
    with member(folder, config={"checkpoint": CheckpointConfig(enabled=False)}) as one:
        one.join()
        one.train()
        one.membership.spool_undelivered()
    (kept,) = spool.read(folder, SECRET)
    assert {type(message) for message in kept.messages} == {JournalLines, StepReceipt}
