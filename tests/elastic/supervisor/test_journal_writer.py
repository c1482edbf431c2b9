"""The journal's only writer: each thing once, receipts merged, nothing torn, nothing lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.elastic.supervisor.shell_parts import new_writer, receipt, resumed, step, written
from tests.virtual_clock import VirtualClock

from paceline.control.messages import StepReceipt
from paceline.core import events, journal
from paceline.core.errors import ResourceError, WireError
from paceline.core.events import (
    Note,
    RunEnded,
    ShardHashed,
    StepCommitted,
    StepsReceived,
    SupervisorStarted,
    WorkerFailed,
    WorkerStarted,
)
from paceline.elastic.supervisor.journal_writer import RECEIPT_SECONDS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(100.0)


@pytest.fixture
def flushed() -> list[tuple[int, int]]:
    return []


@pytest.fixture
def writer(path, clock, flushed):
    made = new_writer(path, clock, flushed)
    yield made
    made.close()


def test_a_step_is_written_once_whichever_member_tells_it(writer, path):
    writer.add_lines([step(1), step(2)])
    writer.add_lines([step(1), step(2), step(3)])
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3]
    assert writer.journaled == 3
    assert written(path, StepCommitted)[2] == events.from_json(step(3))


def test_steps_after_a_restore_are_written_again(writer, path):
    writer.add_lines([step(1), step(2), step(3), resumed(1)])
    writer.add_lines([step(2).replace('"time":2.0', '"time":9.0')])
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3, 2]
    assert writer.journaled == 2


@pytest.mark.parametrize("line", ["", "nonsense", "[]", '{"type": 3}', '{"type":"x"}'])
def test_lines_that_are_no_events_are_refused_and_nothing_of_the_message_counts(writer, path, line):
    with pytest.raises(WireError):
        writer.add_lines([step(1), line])
    writer.add_lines([step(1)])
    assert len(journal.read(path).events) == 1
    assert not journal.read(path).damage


def test_a_run_may_resume_at_any_step_and_goes_on_from_there(writer, path):
    writer.add_lines([resumed(10**9), step(10**9 + 1)], known=0)
    assert writer.journaled == 10**9 + 1
    with pytest.raises(WireError, match="cannot have"):
        writer.add_lines([step(10**12)], known=10**9)


def test_a_successor_knows_what_is_written(writer, path):
    note = events.to_json(Note(time=5.0, text="saved"))
    writer.add_lines([step(1), step(2), note])
    writer.add_receipt(0, 11, receipt(1, 2))
    writer.close()
    heir = new_writer(path)
    heir.add_lines([step(2), note, step(3)])
    heir.add_receipt(0, 11, receipt(1, 3))
    heir.close()
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3]
    assert len(written(path, Note)) == 1
    assert [(one.first, one.last) for one in written(path, StepsReceived)] == [(1, 2), (3, 3)]


def test_receipts_are_merged_and_written_at_a_stated_rate(writer, path, clock, flushed):
    for number in range(1, 1001):
        writer.add_receipt(3, 11, receipt(number, number))
    assert not written(path, StepsReceived)
    assert writer.due <= clock.now() + RECEIPT_SECONDS
    writer.tick(writer.due)
    (line,) = written(path, StepsReceived)
    assert (line.rank, line.pid, line.first, line.last, line.shards) == (3, 11, 1, 1000, [0, 1])
    assert flushed == [(3, 11)]


def test_receipts_of_another_view_or_other_shards_are_another_line(writer, path):
    writer.add_receipt(0, 11, receipt(1, 5))
    writer.add_receipt(0, 11, receipt(6, 8, shards=(0,)))
    writer.add_receipt(0, 11, receipt(9, 9, generation=2))
    writer.flush()
    assert [(one.first, one.last) for one in written(path, StepsReceived)] == [(1, 5), (6, 8), (9, 9)]


def test_a_hash_of_a_shard_is_written_once(writer, path):
    told = StepReceipt(generation=1, first=1, last=1, shards=(0,), shard_hashes=((1, 0, "abc"),))
    writer.add_receipt(0, 11, told)
    writer.add_receipt(0, 11, told)
    assert [one.hash for one in written(path, ShardHashed)] == ["abc"]


def test_while_the_disk_is_full_lines_wait_and_half_a_line_is_taken_back(writer, path, monkeypatch, caplog):
    writer.add_lines([step(1)])

    def full(self: journal.Journal, data: bytes) -> None:
        with open(path, "ab") as file:
            file.write(data[: len(data) // 2])
        raise ResourceError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "_write", full)
        writer.add_lines([step(2), step(3)])
        writer.tick(writer.due)
        assert not writer.complete
        assert writer.journaled == 3
        assert caplog.text.count("the disk is full") == 1
    writer.tick(writer.due)
    assert writer.complete
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3]
    assert not journal.read(path).damage


def test_a_process_fails_once_also_for_the_next_supervisor(tmp_path):
    path = tmp_path / "journal.jsonl"

    def failed(pid: int) -> WorkerFailed:
        return WorkerFailed(time=1.0, rank=1, pid=pid, phase="data", reason="gone", cause="crash")

    first = new_writer(path)
    first.write(SupervisorStarted(time=0.0, pid=1, attempt=1, address=""))
    first.write(failed(7))
    first.close()
    second = new_writer(path)
    second.write(failed(7))
    second.write(failed(8))
    second.close()
    third = new_writer(path)  # another run in the same folder, where process numbers begin anew
    third.write(SupervisorStarted(time=2.0, pid=1, attempt=1, address=""))
    third.close()
    fourth = new_writer(path)
    fourth.write(failed(7))
    fourth.close()
    told = [event.pid for event in journal.read(path).events if isinstance(event, WorkerFailed)]
    assert told == [7, 8, 7]


def test_processes_of_two_containers_with_one_number_are_two(path, writer, flushed):
    """Process numbers begin anew in every container."""
    writer.add_receipt(0, 5, receipt(1, 2))
    writer.add_receipt(2, 5, receipt(1, 2, shards=(4, 5)))
    writer.flush((2, 5))
    assert flushed == [(2, 5)]
    assert not writer.has_written_all_of((0, 5))
    writer.flush()
    assert [(event.rank, event.first, event.last) for event in written(path, StepsReceived)] == [
        (2, 1, 2),
        (0, 1, 2),
    ]


def test_the_next_process_of_a_rank_may_have_the_number_of_the_last(path, writer):
    gone = WorkerFailed(time=1.0, rank=1, pid=5, phase="data", reason="gone", cause="crash")
    writer.write(gone)
    writer.write(gone)  # noticed twice
    writer.write(WorkerStarted(time=2.0, rank=1, pid=5, host="pod-1"))
    writer.write(gone)
    assert len(written(path, WorkerFailed)) == 2


def ended(number: int, reason: str = "finished") -> str:
    return events.to_json(RunEnded(time=2.0, step=number, epoch=0, reason=reason, hash="abc"))


def test_the_end_of_the_run_comes_after_the_last_receipts(writer, path, flushed):
    """A supervisor that is killed in between must not leave a run that has ended, and receipts that never
    come."""
    writer.add_lines([step(1), ended(1)], (0, 11))
    assert not writer.has_written_all_of((0, 11))  # so that the member keeps it, for the next supervisor
    writer.add_receipt(0, 11, receipt(1, 1))
    writer.flush((0, 11))
    assert not written(path, RunEnded)
    writer.add_receipt(1, 12, receipt(1, 1))
    writer.flush((1, 12))
    assert flushed == [(1, 12)]  # who did not tell it does not wait for it
    writer.flush(over=True)
    assert writer.has_written_all_of((0, 11))
    assert flushed == [(1, 12), (0, 11)]
    kinds = [type(event) for event in journal.read(path).events]
    assert kinds == [StepCommitted, StepsReceived, StepsReceived, RunEnded]


def test_of_an_end_that_is_told_again_or_that_was_none_only_the_last_word_counts(writer, path):
    writer.add_lines([step(1), step(2), ended(2, "asked")])
    writer.add_lines([ended(2)])
    writer.flush(over=True)
    assert [event.reason for event in written(path, RunEnded)] == ["finished"]
    writer.add_lines([ended(2, "too soon"), resumed(1)])
    writer.flush(over=True)
    assert len(written(path, RunEnded)) == 1


def test_steps_that_only_a_checkpoint_knew_are_written_where_the_journal_lacks_them(writer, path):
    writer.add_lines([step(1), step(2)])
    writer.add_lines([step(2), step(3), step(4), resumed(4)])
    writer.add_lines([step(8), step(9), resumed(9)])  # what lies between is lost
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3, 4, 8, 9]
    assert writer.journaled == 9


def test_an_evaluation_and_the_end_of_an_epoch_are_written_once_whichever_member_tells_them(writer, path):
    def evaluated(number: int, time: float) -> str:
        return events.to_json(events.Evaluated(time=time, step=number, epoch=0, samples=1, metrics={}))

    def epoch_ended(number: int, time: float) -> str:
        return events.to_json(
            events.EpochEnded(time=time, epoch=number, steps=2, samples=4, loss=0.5, seconds=1.0)
        )

    writer.add_lines([step(1), step(2), evaluated(2, 1.0), epoch_ended(0, 1.0)])
    writer.add_lines([step(2), evaluated(2, 2.0), epoch_ended(0, 2.0), step(3), evaluated(3, 2.0)])
    assert [event.step for event in written(path, events.Evaluated)] == [2, 3]
    assert [event.epoch for event in written(path, events.EpochEnded)] == [0]
    writer.add_lines([resumed(2), evaluated(2, 3.0), epoch_ended(0, 3.0)])
    assert [event.step for event in written(path, events.Evaluated)] == [2, 3, 2]
    assert [event.epoch for event in written(path, events.EpochEnded)] == [0, 0]
