"""Events become lines and lines events; the journal survives torn lines, newer writers and full disks."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from paceline.core import events, journal
from paceline.core.errors import PlatformError, ResourceError, UsageError, WireError
from paceline.core.events import Note, StepCommitted, UnknownEvent, WorkerFailed, WorkerStarted
from paceline.core.journal import Journal, PatientJournal

STARTED = WorkerStarted(time=1.5, rank=0, pid=42, host="a")
COMMITTED = StepCommitted(time=2.0, step=1, epoch=0, loss=0.25, samples=64)


@given(
    st.builds(Note, time=st.floats(allow_nan=False), text=st.text(), rank=st.none() | st.integers())
    | st.builds(
        StepCommitted,
        time=st.floats(allow_nan=False),
        step=st.integers(),
        epoch=st.integers(),
        loss=st.floats(allow_nan=False),
        samples=st.integers(),
        hash=st.none() | st.text(),
    )
    | st.builds(
        WorkerFailed,
        time=st.floats(allow_nan=False),
        rank=st.integers(),
        pid=st.integers(),
        phase=st.text(),
        reason=st.text(),
    )
)
def test_events_come_back_from_standard_json(event):
    line = events.to_json(event)
    assert "\n" not in line

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(line, parse_constant=refuse)
    assert events.from_json(line) == event


def test_a_loss_that_is_not_a_number_is_still_standard_json():
    line = events.to_json(StepCommitted(time=1.0, step=1, epoch=0, loss=math.nan, samples=1))
    assert json.loads(line)["loss"] == "NaN"
    event = events.from_json(line)
    assert isinstance(event, StepCommitted)
    assert math.isnan(event.loss)


def test_types_are_named_in_snake_case_and_come_first():
    assert events.to_json(STARTED).startswith('{"type":"worker_started","time":1.5,')
    assert (Note.type, StepCommitted.type) == ("note", "step_committed")


def test_an_unknown_type_is_kept_and_written_back_unchanged():
    line = '{"type":"moon_landed","time":3.0,"crew":[1,2]}'
    event = events.from_json(line)
    assert event == UnknownEvent(time=3.0, name="moon_landed", data={"crew": [1, 2]})
    assert events.to_json(event) == line


def test_a_known_type_of_a_newer_writer_is_read_as_far_as_it_goes():
    data = json.loads(events.to_json(STARTED))
    assert events.from_json(json.dumps({**data, "gpu": "new"})) == STARTED
    assert isinstance(events.from_json(json.dumps({**data, "rank": "seven"})), UnknownEvent)
    del data["pid"]
    assert isinstance(events.from_json(json.dumps(data)), UnknownEvent)


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"time":1}', "\0\0", "[" * 100_000])
def test_what_is_no_event_is_refused(line):
    with pytest.raises(WireError):
        events.from_json(line)


def test_an_event_must_be_registered_and_its_name_its_own():
    @dataclass(frozen=True, kw_only=True)
    class Stray(events.Event):
        pass

    with pytest.raises(UsageError, match="Stray is not a registered event"):
        events.to_json(Stray(time=0.0))

    class Note(events.Event):
        pass

    with pytest.raises(UsageError, match="two events are called note"):
        events.register(Note)


def test_what_was_appended_is_read_in_order(tmp_path):
    path = tmp_path / "run" / "journal.jsonl"
    with Journal(path, fsync=True) as writer:
        writer.append(STARTED)
        writer.append(COMMITTED)
    assert list(journal.iterate(path)) == [STARTED, COMMITTED]


def test_a_live_journal_is_followed_by_offset(tmp_path):
    path = tmp_path / "j"
    with Journal(path) as writer:
        assert journal.read(path) == journal.Chunk((), (), 0)
        writer.append(STARTED)
        first = journal.read(path)
        assert first.events == (STARTED,)
        assert journal.read(path, first.offset).events == ()
        writer.append(COMMITTED)
        assert journal.read(path, first.offset).events == (COMMITTED,)


def test_a_torn_last_line_waits_for_its_rest(tmp_path):
    path = tmp_path / "j"
    line = events.to_json(COMMITTED).encode() + b"\n"
    with open(path, "wb", buffering=0) as file:
        file.write(events.to_json(STARTED).encode() + b"\n" + line[:20])
        chunk = journal.read(path)
        assert (chunk.events, chunk.damage) == ((STARTED,), ())
        file.write(line[20:])
    assert journal.read(path, chunk.offset).events == (COMMITTED,)


def test_a_line_torn_by_a_crash_is_reported_once_writing_goes_on(tmp_path, caplog):
    path = tmp_path / "j"
    start = events.to_json(STARTED).encode() + b"\n"
    path.write_bytes(start + b'{"type":"step_comm')
    with Journal(path) as writer:
        writer.append(COMMITTED)
    chunk = journal.read(path)
    assert chunk.events == (STARTED, COMMITTED)
    (damage,) = chunk.damage
    assert (damage.offset, damage.text) == (len(start), '{"type":"step_comm')
    found: list[journal.JournalDamage] = []
    assert list(journal.iterate(path, on_damage=found.append)) == [STARTED, COMMITTED]
    assert found == [damage]
    with caplog.at_level(logging.WARNING):
        list(journal.iterate(path))
    assert f"byte {len(start)}" in caplog.text


def test_reading_in_small_pieces_finds_the_same(tmp_path):
    path = tmp_path / "j"
    with Journal(path) as writer:
        for step in range(50):
            writer.append(Note(time=float(step), text="x" * step))
    offset = 0
    found: list[events.Event] = []
    while (chunk := journal.read(path, offset, max_bytes=40)).offset != offset:
        found += chunk.events
        offset = chunk.offset
    assert found == list(journal.iterate(path))
    assert len(found) == 50


def test_threads_do_not_mix_their_lines(tmp_path):
    path = tmp_path / "j"

    def write(rank: int) -> None:
        for _ in range(50):
            writer.append(Note(time=0.0, text="y" * 500, rank=rank))

    with Journal(path) as writer:
        threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    chunk = journal.read(path)
    assert (len(chunk.events), chunk.damage) == (200, ())


def test_a_closed_journal_a_missing_one_and_a_full_disk(tmp_path):
    writer = Journal(tmp_path / "j")
    writer.close()
    writer.close()
    with pytest.raises(UsageError, match="is closed"):
        writer.append(STARTED)
    with pytest.raises(UsageError, match="no journal at"):
        journal.read(tmp_path / "nowhere")
    with pytest.raises(PlatformError, match="cannot be opened"):
        Journal(tmp_path)
    with Journal("/dev/full") as full, pytest.raises(ResourceError, match="free space"):
        full.append(STARTED)


def test_a_journal_whose_size_is_not_known_is_not_cut(tmp_path, monkeypatch):
    """Half a line is taken back where the length before is known; else earlier events would go with it."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as writer:
        patient = PatientJournal(writer, alone=True)
        patient.append(STARTED)

        def refuse(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr(os, "stat", refuse)
            broken.setattr(os, "write", refuse)
            patient.append(STARTED)
        assert not patient.complete
        assert journal.read(path).events == (STARTED,)
        patient.retry()
        assert journal.read(path).events == (STARTED, STARTED)


@pytest.mark.parametrize("more", [1 << 20, (2 << 20) - 1, 2 << 20, 5 << 20])
def test_a_line_that_is_too_long_is_passed_over_and_the_next_is_read(tmp_path, more):
    path = tmp_path / "journal.jsonl"
    good = journal.encoded(events.Note(time=1.0, text="after it"))
    path.write_bytes(b"x" * (journal.LONGEST_LINE + more) + b"\n" + good)
    damage: list[journal.JournalDamage] = []
    assert list(journal.iterate(path, on_damage=damage.append)) == [events.Note(time=1.0, text="after it")]
    (line,) = damage
    assert line.offset == 0
    assert f"{journal.LONGEST_LINE + more + 1} bytes" in line.reason
