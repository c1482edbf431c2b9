"""What workers spool is read by the next start of the run, also by one of a later version."""

from __future__ import annotations

import json
import os
from pathlib import Path

from paceline.control import spool, supervisor_address
from paceline.control.messages import JournalLines, StepReceipt

SECRET = b"s" * supervisor_address.SECRET_BYTES
LINES = JournalLines(generation=3, lines=('{"type":"note"}',))
RECEIPT = StepReceipt(generation=3, first=4, last=5, shards=(0, 2), hashes={"4": "ab"})


def test_what_was_spooled_is_read_and_removed(tmp_path: Path) -> None:
    supervisor_address.write_secret(tmp_path, SECRET)
    assert not spool.has_spool(tmp_path)
    spool.write(tmp_path, SECRET, 7, 1, [LINES, RECEIPT])
    assert spool.has_spool(tmp_path)
    (found,) = spool.read(tmp_path, SECRET)
    assert (found.rank, found.pid, found.messages) == (1, os.getpid(), (LINES, RECEIPT))
    spool.remove_spool(tmp_path, [found])
    assert not spool.has_spool(tmp_path)


def test_the_lines_of_a_file_are_as_in_every_version(tmp_path: Path) -> None:
    """A file outlives the Paceline that wrote it: its words stay as they are."""
    supervisor_address.write_secret(tmp_path, SECRET)
    spool.write(tmp_path, SECRET, 7, 1, [LINES, RECEIPT])
    (file,) = (tmp_path / "unheard").iterdir()
    header, *messages = map(json.loads, file.read_text().splitlines())
    assert file.name == f"7-{os.getpid()}.jsonl"
    assert header.keys() == {"rank", "pid", "of"}
    receipt = {
        "generation": 3,
        "first": 4,
        "last": 5,
        "shards": [0, 2],
        "hashes": {"4": "ab"},
        "shard_hashes": [],
        "agreed": -1,
        "trail": [],
    }
    assert messages == [
        ["Told", {"generation": 3, "lines": ['{"type":"note"}']}],
        ["Receipt", receipt],
    ]


def test_files_of_another_start_are_removed(tmp_path: Path) -> None:
    supervisor_address.write_secret(tmp_path, SECRET)
    spool.write(tmp_path, SECRET, 7, 1, [LINES])
    assert spool.read(tmp_path, b"t" * supervisor_address.SECRET_BYTES) == []
    assert list((tmp_path / "unheard").iterdir()) == []
