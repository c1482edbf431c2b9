"""A file is replaced as a whole, or not at all; a file that is created once keeps its first content."""

from __future__ import annotations

import os
import stat

import pytest

from paceline.core import atomic_file
from paceline.core.errors import PlatformError
from paceline.testing.storage_crash_points import CallRecorder, CrashPoint, Killer, points, run_forked


def test_every_crash_leaves_the_old_content_or_the_new(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    calls = CallRecorder()
    atomic_file.replace(path, [b"ne", b"w"], call=calls)
    seen = set()
    for point in points(calls.made):
        path.write_bytes(b"old")

        def replace(point: CrashPoint = point) -> None:
            atomic_file.replace(path, [b"ne", b"w"], call=Killer(point))

        assert run_forked(replace) == -9
        seen.add(path.read_bytes())
        # What was left under the temporary name is in the way of no later writer.
        atomic_file.replace(path, [b"next"])
        assert os.listdir(tmp_path) == ["file"]
    assert seen == {b"old", b"new"}


def test_the_mode_holds_from_the_first_byte_on(tmp_path):
    path = tmp_path / "secret"
    (tmp_path / "secret.tmp").write_bytes(b"readable by all")
    modes = []

    def look(operation, /, *args, **kwargs):
        if operation.__name__ == "write":
            modes.append(stat.S_IMODE(os.fstat(args[0]).st_mode))
        return operation(*args, **kwargs)

    atomic_file.replace(path, [b"x"], mode=0o600, call=look)
    assert modes == [0o600]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "folder").write_bytes(b"a file")
    with pytest.raises(PlatformError, match="json cannot be written"):
        atomic_file.replace_file(tmp_path / "folder" / "control.json", b"{}")


def test_the_first_content_stays(tmp_path):
    path = tmp_path / "key"
    atomic_file.create_once(path, b"first", mode=0o600)
    atomic_file.create_once(path, b"second", mode=0o600)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["key"]
