"""A supervisor whose predecessor's snapshot is gone: what the journal and the parent still know."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.elastic.supervisor.shell_parts import Parts, new_writer

from paceline.core import fd_messages
from paceline.core.errors import PacelineError
from paceline.core.events import SupervisorStarted, ViewChanged, WorkerStarted
from paceline.elastic.machine.machine_events import SupervisorBegan
from paceline.elastic.supervisor.parent_messages import KeptWorkers
from paceline.elastic.supervisor.supervisor_recovery import (
    SKIPPED_NUMBERS,
    STATE_FILE,
    SnapshotFile,
    SupervisorSnapshot,
    recover,
    recover_from_journal,
)


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "journal.jsonl"
    writer = new_writer(path)
    writer.write(SupervisorStarted(time=0.0, pid=1, attempt=1, address=""))
    writer.write(WorkerStarted(time=0.0, rank=9, pid=100, host="h"))  # of an earlier run
    writer.write(view(40, (9,), (100,)))
    writer.write(SupervisorStarted(time=1.0, pid=2, attempt=1, address=""))
    for rank, pid in ((0, 101), (1, 102), (2, 103)):
        writer.write(WorkerStarted(time=1.0, rank=rank, pid=pid, host="h"))
    writer.write(view(3, (0, 1), (101, 102)))
    writer.write(SupervisorStarted(time=2.0, pid=3, attempt=2, address=""))
    writer.write(view(5, (0, 1, 3), (101, 102, 104)))
    writer.close()
    return path


def view(generation: int, ranks: tuple[int, ...], pids: tuple[int, ...]) -> ViewChanged:
    return ViewChanged(
        time=1.0,
        generation=generation,
        reason="r",
        members=list(ranks),
        shards=[[0] for _ in ranks],
        pids=list(pids),
        hosts=["h" for _ in ranks],
        step=1,
        behind=[],
    )


def test_ranks_and_generations_of_this_run_only(journal: Path):
    kept: KeptWorkers = {11: (101, (0,)), 12: (104, (0,)), 13: (100, (0,)), 14: (999, (0,))}
    began = recover_from_journal(journal, kept)
    assert began is not None
    assert began.members == {11: (0, 0), 12: (3, 0)}
    assert began.generation == 5 + SKIPPED_NUMBERS
    assert began.next_member == 14 + SKIPPED_NUMBERS
    assert began.committed


def test_before_the_first_worker_there_is_nothing_to_recover(tmp_path: Path):
    assert recover_from_journal(tmp_path / "none", {}) is None
    reported: list[PacelineError] = []
    assert recover(tmp_path / "none", {}, "gone", reported.append) == SupervisorBegan()
    assert not reported


def test_workers_whose_rank_is_not_known_are_killed(journal: Path, parts: Parts):
    known, unknown = parts.process()[0], fd_messages.pair()
    kept = {11: (101, known.descriptors()), 14: (0, (os.dup(unknown[0].fileno()),))}
    unknown[0].close()
    reported: list[PacelineError] = []
    began = recover(journal, kept, "supervisor.json is missing", reported.append)
    assert list(began.members) == list(kept) == [11]
    (error,) = reported
    assert "supervisor.json is missing. 1 worker is known" in error.message
    with unknown[1] as theirs:
        assert theirs.recv(10) == b""  # its socket is closed, so that it ends


@pytest.mark.parametrize(
    ("damage", "trouble"),
    [("", "is missing"), ("{", "is damaged"), ('{"port": "x"}', "is damaged"), ('{"more": 1}', "is damaged")],
)
def test_a_snapshot_that_cannot_be_read_says_why(tmp_path: Path, damage: str, trouble: str):
    if damage:
        (tmp_path / STATE_FILE).write_text(damage)
    file = SnapshotFile(tmp_path)
    assert file.load() is None
    assert trouble in file.trouble


def test_a_snapshot_is_read_as_it_was_written_and_only_written_when_it_changes(tmp_path: Path):
    file = SnapshotFile(tmp_path)
    snapshot = SupervisorSnapshot(
        SupervisorBegan(generation=3, members={7: (2, 1)}),
        5,
        {"cpu": "a"},
        "m",
        {7: (11, "h")},
        ((2, 0, 7, 0),),
    )
    file.save(snapshot)
    assert SnapshotFile(tmp_path).load() == snapshot
    (tmp_path / STATE_FILE).unlink()
    file.save(snapshot)
    assert not (tmp_path / STATE_FILE).exists()
    file.save(SupervisorSnapshot(port=6))
    assert json.loads((tmp_path / STATE_FILE).read_text())["port"] == 6
    file.remove()
    assert SnapshotFile(tmp_path).load() is None
