"""The journal's only writer: each thing once, receipts merged, nothing torn, nothing lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.core import events, journal
from paceline.core.control.messages import Receipt
from paceline.core.errors import ResourceError, WireError
from paceline.core.events import (
    Note,
    RunEnded,
    RunResumed,
    ShardHashed,
    StepCommitted,
    StepsReceived,
    SupervisorStarted,
    WorkerFailed,
)
from paceline.elastic.shell.chronicle import RECEIPT_SECONDS, Chronicle


def step(number: int) -> str:
    return events.to_json(StepCommitted(time=float(number), step=number, epoch=0, loss=0.5, samples=8))


def resumed(number: int) -> str:
    return events.to_json(RunResumed(time=1.0, version=1, step=number, epoch=0, workers=2))


def receipt(first: int, last: int, *, generation: int = 1, shards: tuple[int, ...] = (0, 1)) -> Receipt:
    return Receipt(generation=generation, first=first, last=last, shards=shards)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.fixture
def chronicle(path):
    made = Chronicle(path)
    yield made
    made.close()


def written(path: Path, kind: type) -> list:
    return [event for event in journal.read(path).events if isinstance(event, kind)]


def test_a_step_is_written_once_whoever_tells_it(chronicle, path):
    chronicle.tell([step(1), step(2)])
    chronicle.tell([step(1), step(2), step(3)])
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3]
    assert chronicle.journaled == 3
    assert written(path, StepCommitted)[2] == events.from_json(step(3))


def test_steps_after_a_restore_are_written_again(chronicle, path):
    chronicle.tell([step(1), step(2), step(3), resumed(1)])
    chronicle.tell([step(2).replace('"time":2.0', '"time":9.0')])
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3, 2]
    assert chronicle.journaled == 2


@pytest.mark.parametrize("line", ["", "nonsense", "[]", '{"type": 3}', '{"type":"x"}'])
def test_lines_that_are_no_events_are_refused_and_nothing_of_the_message_counts(chronicle, path, line):
    with pytest.raises(WireError):
        chronicle.tell([step(1), line])
    chronicle.tell([step(1)])
    assert len(journal.read(path).events) == 1
    assert not journal.read(path).damage


def test_a_run_may_resume_at_any_step_and_goes_on_from_there(chronicle, path):
    chronicle.tell([resumed(10**9), step(10**9 + 1)], known=0)
    assert chronicle.journaled == 10**9 + 1
    with pytest.raises(WireError, match="cannot have"):
        chronicle.tell([step(10**12)], known=10**9)


def test_a_successor_knows_what_is_written(chronicle, path):
    note = events.to_json(Note(time=5.0, text="saved"))
    chronicle.tell([step(1), step(2), note])
    chronicle.receive(0, 11, receipt(1, 2))
    chronicle.close()
    heir = Chronicle(path)
    heir.tell([step(2), note, step(3)])
    heir.receive(0, 11, receipt(1, 3))
    heir.close()
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3]
    assert len(written(path, Note)) == 1
    assert [(one.first, one.last) for one in written(path, StepsReceived)] == [(1, 2), (3, 3)]


def test_receipts_are_merged_and_written_at_a_stated_rate(chronicle, path):
    for number in range(1, 1001):
        chronicle.receive(3, 11, receipt(number, number))
    assert not written(path, StepsReceived)
    assert chronicle.due <= time.monotonic() + RECEIPT_SECONDS
    flushed: list[int] = []
    chronicle.on_flush = flushed.append
    chronicle.tick(chronicle.due)
    (line,) = written(path, StepsReceived)
    assert (line.rank, line.pid, line.first, line.last, line.shards) == (3, 11, 1, 1000, [0, 1])
    assert flushed == [11]


def test_receipts_of_another_view_or_other_shards_are_another_line(chronicle, path):
    chronicle.receive(0, 11, receipt(1, 5))
    chronicle.receive(0, 11, receipt(6, 8, shards=(0,)))
    chronicle.receive(0, 11, receipt(9, 9, generation=2))
    chronicle.flush()
    assert [(one.first, one.last) for one in written(path, StepsReceived)] == [(1, 5), (6, 8), (9, 9)]


def test_a_hash_of_a_shard_is_written_once(chronicle, path):
    told = Receipt(generation=1, first=1, last=1, shards=(0,), shard_hashes=((1, 0, "abc"),))
    chronicle.receive(0, 11, told)
    chronicle.receive(0, 11, told)
    assert [one.hash for one in written(path, ShardHashed)] == ["abc"]


def test_while_the_disk_is_full_lines_wait_and_half_a_line_is_taken_back(
    chronicle, path, monkeypatch, caplog
):
    chronicle.tell([step(1)])

    def full(self: journal.Journal, data: bytes) -> None:
        with open(path, "ab") as file:
            file.write(data[: len(data) // 2])
        raise ResourceError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "_write", full)
        chronicle.tell([step(2), step(3)])
        chronicle.tick(chronicle.due)
        assert not chronicle.complete
        assert chronicle.journaled == 3
        assert caplog.text.count("the disk is full") == 1
    chronicle.tick(chronicle.due)
    assert chronicle.complete
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3]
    assert not journal.read(path).damage


def test_a_process_fails_once_also_for_the_next_supervisor(tmp_path):
    path = tmp_path / "journal.jsonl"

    def failed(pid: int) -> WorkerFailed:
        return WorkerFailed(time=1.0, rank=1, pid=pid, phase="data", reason="gone", cause="crash")

    first = Chronicle(path)
    first.write(SupervisorStarted(time=0.0, pid=1, attempt=1, address=""))
    first.write(failed(7))
    first.close()
    second = Chronicle(path)
    second.write(failed(7))
    second.write(failed(8))
    second.close()
    third = Chronicle(path)  # another run in the same folder, where process numbers begin anew
    third.write(SupervisorStarted(time=2.0, pid=1, attempt=1, address=""))
    third.close()
    fourth = Chronicle(path)
    fourth.write(failed(7))
    fourth.close()
    told = [event.pid for event in journal.read(path).events if isinstance(event, WorkerFailed)]
    assert told == [7, 8, 7]


def ended(number: int, reason: str = "finished") -> str:
    return events.to_json(RunEnded(time=2.0, step=number, epoch=0, reason=reason, hash="abc"))


def test_the_end_of_the_run_comes_after_the_last_receipts(chronicle, path):
    """Whoever is killed in between must not leave a run that has ended, and receipts that never come."""
    confirmed: list[int] = []
    chronicle.on_flush = confirmed.append
    chronicle.tell([step(1), ended(1)], 11)
    assert chronicle.holds_back(11)  # so that the member keeps it, for the next supervisor
    chronicle.receive(0, 11, receipt(1, 1))
    chronicle.flush(11)
    assert not written(path, RunEnded)
    chronicle.receive(1, 12, receipt(1, 1))
    chronicle.flush(12)
    assert confirmed == [12]  # who did not tell it does not wait for it
    chronicle.flush(over=True)
    assert not chronicle.holds_back(11)
    assert confirmed == [12, 11]
    kinds = [type(event) for event in journal.read(path).events]
    assert kinds == [StepCommitted, StepsReceived, StepsReceived, RunEnded]


def test_of_an_end_that_is_told_again_or_that_was_none_only_the_last_word_counts(chronicle, path):
    chronicle.tell([step(1), step(2), ended(2, "asked")])
    chronicle.tell([ended(2)])
    chronicle.flush(over=True)
    assert [event.reason for event in written(path, RunEnded)] == ["finished"]
    chronicle.tell([ended(2, "too soon"), resumed(1)])
    chronicle.flush(over=True)
    assert len(written(path, RunEnded)) == 1


def test_steps_that_only_a_checkpoint_knew_are_written_where_the_journal_lacks_them(chronicle, path):
    chronicle.tell([step(1), step(2)])
    chronicle.tell([step(2), step(3), step(4), resumed(4)])
    chronicle.tell([step(8), step(9), resumed(9)])  # what lies between is lost
    assert [event.step for event in written(path, StepCommitted)] == [1, 2, 3, 4, 8, 9]
    assert chronicle.journaled == 9
