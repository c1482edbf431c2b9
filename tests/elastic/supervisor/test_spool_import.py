"""What workers left when no supervisor heard them: taken into the journal once, and only by its own run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.elastic.supervisor.shell_parts import new_writer, receipt, resumed, step, written

from paceline.control import spool, supervisor_address
from paceline.control.messages import ControlMessage, JournalLines, StepReceipt
from paceline.core.errors import ResourceError
from paceline.core.events import RunResumed, ShardHashed, StepCommitted, StepsReceived
from paceline.core.journal import Journal
from paceline.elastic.supervisor.journal_writer import JournalWriter

SECRET = b"s" * 32


def told(*lines: str) -> JournalLines:
    return JournalLines(generation=1, lines=lines)


def leave(folder: Path, member: int, *said: ControlMessage, secret: bytes = SECRET) -> None:
    spool.write(folder, secret, member, member, said)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    supervisor_address.write_secret(tmp_path, SECRET)
    return tmp_path


@pytest.fixture
def journal(folder: Path) -> Path:
    return folder / "journal.jsonl"


def taken(folder: Path, secret: bytes = SECRET) -> None:
    journal = new_writer(folder / "journal.jsonl")
    journal.import_spool(folder, secret)
    journal.close()


def written_before(journal: Path) -> Iterator[JournalWriter]:
    writer = new_writer(journal)
    yield writer
    writer.close()


def test_only_what_the_journal_lacks_is_written(folder, journal):
    for writer in written_before(journal):
        writer.add_lines([resumed(0), step(1), step(2), step(3)])
        writer.add_receipt(0, os.getpid(), receipt(1, 2))
    leave(folder, 1, told(step(4), step(5)))  # the one that took over from the first
    leave(folder, 0, told(resumed(0), step(1)), told(step(2), step(3), step(4)), receipt(1, 4))
    taken(folder)
    assert [event.step for event in written(journal, StepCommitted)] == [1, 2, 3, 4, 5]
    assert len(written(journal, RunResumed)) == 1
    assert [(event.first, event.last) for event in written(journal, StepsReceived)] == [(1, 2), (3, 4)]
    assert not spool.has_spool(folder)
    before = journal.read_bytes()
    taken(folder)
    assert journal.read_bytes() == before


def test_receipts_keep_their_view_shards_and_hashes(folder, journal):
    hashed = StepReceipt(
        generation=3, first=7, last=7, shards=(2, 3), shard_hashes=((7, 2, "aa"), (7, 3, "bb"))
    )
    leave(folder, 1, hashed)
    taken(folder)
    (one,) = written(journal, StepsReceived)
    assert (one.rank, one.pid, one.generation, one.shards) == (1, os.getpid(), 3, [2, 3])
    assert [(event.step, event.shard, event.hash) for event in written(journal, ShardHashed)] == [
        (7, 2, "aa"),
        (7, 3, "bb"),
    ]


def test_a_gap_hides_nothing(folder, journal):
    """Words that were given up, because too many waited: what follows them is written all the same."""
    leave(folder, 0, told(step(8), step(9)))
    taken(folder)
    assert [event.step for event in written(journal, StepCommitted)] == [8, 9]


def test_workers_of_an_earlier_start_have_no_say(folder, journal):
    leave(folder, 0, told(step(1)))
    supervisor_address.write_secret(folder, b"t" * 32)
    leave(folder, 1, told(step(1)))  # it notices that the folder is another's
    assert len(list((folder / spool.FOLDER).iterdir())) == 1
    taken(folder, b"t" * 32)
    assert not written(journal, StepCommitted)
    assert not spool.has_spool(folder)


def test_nothing_to_say_leaves_nothing(folder):
    leave(folder, 0)
    assert not spool.has_spool(folder)


def test_damage_is_left_out_and_said(folder, journal, caplog):
    leave(folder, 0, told(step(1)), receipt(1, 1))
    (file,) = (folder / spool.FOLDER).iterdir()
    file.write_text(file.read_text().replace('["Receipt"', '["Recei'))
    (folder / spool.FOLDER / "9-9.jsonl").write_text("half a li")
    taken(folder)
    assert [event.step for event in written(journal, StepCommitted)] == [1]
    assert not written(journal, StepsReceived)
    assert "9-9.jsonl cannot be read" in caplog.text
    assert "a damaged line is left out" in caplog.text


def test_what_has_no_room_stays_where_it_is(folder, journal, monkeypatch):
    leave(folder, 0, told(step(1)), receipt(1, 1))

    def full(self: Journal, lines: bytes) -> None:
        raise ResourceError("the disk is full", remedy="make room")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append_lines", full)
        taken(folder)
    assert spool.has_spool(folder)
    taken(folder)
    assert [event.step for event in written(journal, StepCommitted)] == [1]
    assert len(written(journal, StepsReceived)) == 1
    assert not spool.has_spool(folder)
