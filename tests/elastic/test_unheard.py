"""What workers left when nobody heard them: taken into the journal once, and only by its own run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.elastic.test_chronicle import receipt, resumed, step, written

from paceline.core.control import address, unheard
from paceline.core.control.messages import Message, Receipt, Told
from paceline.core.errors import ResourceError
from paceline.core.events import RunResumed, ShardHashed, StepCommitted, StepsReceived
from paceline.core.journal import Journal
from paceline.elastic.shell.chronicle import Chronicle
from paceline.elastic.shell.unheard import take_in

SECRET = b"s" * 32


def told(*lines: str) -> Told:
    return Told(generation=1, lines=lines)


def leave(folder: Path, member: int, *said: Message, secret: bytes = SECRET) -> None:
    unheard.write(folder, secret, member, member, said)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    address.write_secret(tmp_path, SECRET)
    return tmp_path


@pytest.fixture
def journal(folder: Path) -> Path:
    return folder / "journal.jsonl"


def taken(folder: Path, secret: bytes = SECRET) -> None:
    chronicle = Chronicle(folder / "journal.jsonl")
    take_in(chronicle, folder, secret)
    chronicle.close()


def heard_before(journal: Path) -> Iterator[Chronicle]:
    chronicle = Chronicle(journal)
    yield chronicle
    chronicle.close()


def test_only_what_the_journal_lacks_is_written(folder, journal):
    for chronicle in heard_before(journal):
        chronicle.tell([resumed(0), step(1), step(2), step(3)])
        chronicle.receive(0, os.getpid(), receipt(1, 2))
    leave(folder, 1, told(step(4), step(5)))  # the one that took over from the first
    leave(folder, 0, told(resumed(0), step(1)), told(step(2), step(3), step(4)), receipt(1, 4))
    taken(folder)
    assert [event.step for event in written(journal, StepCommitted)] == [1, 2, 3, 4, 5]
    assert len(written(journal, RunResumed)) == 1
    assert [(event.first, event.last) for event in written(journal, StepsReceived)] == [(1, 2), (3, 4)]
    assert not unheard.is_there(folder)
    before = journal.read_bytes()
    taken(folder)
    assert journal.read_bytes() == before


def test_receipts_keep_their_view_shards_and_hashes(folder, journal):
    hashed = Receipt(generation=3, first=7, last=7, shards=(2, 3), shard_hashes=((7, 2, "aa"), (7, 3, "bb")))
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
    address.write_secret(folder, b"t" * 32)
    leave(folder, 1, told(step(1)))  # it notices that the folder is another's
    assert len(list((folder / unheard.FOLDER).iterdir())) == 1
    taken(folder, b"t" * 32)
    assert not written(journal, StepCommitted)
    assert not unheard.is_there(folder)


def test_nothing_to_say_leaves_nothing(folder):
    leave(folder, 0)
    assert not unheard.is_there(folder)


def test_damage_is_left_out_and_said(folder, journal, caplog):
    leave(folder, 0, told(step(1)), receipt(1, 1))
    (file,) = (folder / unheard.FOLDER).iterdir()
    file.write_text(file.read_text().replace('["Receipt"', '["Recei'))
    (folder / unheard.FOLDER / "9-9.jsonl").write_text("half a li")
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
    assert unheard.is_there(folder)
    taken(folder)
    assert [event.step for event in written(journal, StepCommitted)] == [1]
    assert len(written(journal, StepsReceived)) == 1
    assert not unheard.is_there(folder)
