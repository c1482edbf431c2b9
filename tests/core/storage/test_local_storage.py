"""A local disk: durable, atomic, past the cache, and clear about what went wrong."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from paceline.checkpoint.tensor_file import image_memory
from paceline.core.errors import PlatformError, ResourceError, UnavailableError, UsageError
from paceline.core.storage import local_storage
from paceline.core.storage.local_storage import LocalStorage
from paceline.core.storage.open_storage import open_storage
from paceline.testing.storage_crash_points import CallRecorder, run_forked

MB = 1 << 20


def pattern(nbytes: int) -> memoryview:
    region = image_memory(nbytes)
    region[:nbytes] = os.urandom(1024) * (nbytes // 1024) + os.urandom(nbytes % 1024)
    return memoryview(region)[:nbytes]


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4 * MB - 1, 4 * MB, 9 * MB + 4096, 9 * MB + 1234])
def test_a_large_file_holds_what_was_written(tmp_path, nbytes):
    calls = CallRecorder()
    storage = LocalStorage(str(tmp_path), call=calls)
    data = pattern(nbytes)
    storage.write("file", data)
    assert (tmp_path / "file").read_bytes() == data
    assert storage.size("file") == nbytes
    names = [call.name for call in calls.made]
    # After the last write: flushed, then its folder flushed.
    assert [name for name in names if name == "fsync"] == ["fsync", "fsync"]
    assert "fsync" not in names[: len(names) - 1 - names[::-1].index("write")] if nbytes else True
    assert ("fcntl" in names) == (nbytes >= 4 * MB)


def test_memory_that_does_not_begin_on_a_page_goes_through_the_cache(tmp_path):
    calls = CallRecorder()
    LocalStorage(str(tmp_path), call=calls).write("file", pattern(5 * MB)[1:])
    assert "fcntl" not in {call.name for call in calls.made}


@pytest.mark.parametrize("refused", ["fcntl", "write"])
def test_a_file_system_that_cannot_write_past_the_cache(tmp_path, refused):
    failed: list[object] = []

    def refusing(operation, /, *args, **kwargs):
        if operation.__name__ == refused and not failed:
            failed.append(args)
            raise OSError(errno.EINVAL, "Invalid argument")
        return operation(*args, **kwargs)

    data = pattern(9 * MB + 77)
    LocalStorage(str(tmp_path), call=refusing).write("file", data)
    assert failed
    assert (tmp_path / "file").read_bytes() == data


def test_short_writes_are_continued(tmp_path):
    def short(operation, /, *args, **kwargs):
        if operation.__name__ == "write":
            descriptor, data = args
            return os.write(descriptor, data[: max(1, len(data) // 3 // 512 * 512)])
        return operation(*args, **kwargs)

    data = pattern(5 * MB + 5)
    LocalStorage(str(tmp_path), call=short).write("file", data)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, ResourceError), (errno.EDQUOT, ResourceError), (errno.EIO, PlatformError)],
)
@pytest.mark.parametrize("name", ["open", "write", "fsync", "close", "rename"])
def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path, code, kind, name):
    def failing(operation, /, *args, **kwargs):
        if operation.__name__ == name:
            if name == "close":
                operation(*args, **kwargs)
            raise OSError(code, os.strerror(code))
        return operation(*args, **kwargs)

    storage = LocalStorage(str(tmp_path), call=failing)
    (tmp_path / "old").write_bytes(b"old")
    with pytest.raises(kind, match=f"old cannot be written: {os.strerror(code)}"):
        storage.put("old", b"new")
    assert (tmp_path / "old").read_bytes() == b"old"
    if name != "rename":
        with pytest.raises(kind, match="new cannot be written"):
            storage.write("new", memoryview(b"data"))
    assert os.listdir(tmp_path) == ["old"]


def test_reading_creates_nothing(tmp_path):
    storage = open_storage(tmp_path / "nowhere")
    assert storage.names("") == []
    assert storage.size("x") is None
    with pytest.raises(FileNotFoundError):
        storage.read("x")
    storage.remove("x")
    storage.remove_folder("x")
    assert os.listdir(tmp_path) == []


def test_folders(tmp_path):
    storage = open_storage(f"file://{tmp_path}/a/b")
    assert storage.make_folder("v1")
    assert not storage.make_folder("v1")
    storage.put("v1/x", b"1")
    assert storage.names("") == ["v1"]
    with pytest.raises(PlatformError, match="cannot be deleted"):
        storage.remove_folder("v1")
    storage.remove("v1/x", durable=True)
    storage.remove_folder("v1")
    assert storage.names("") == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PlatformError, match="Not a directory"):
        open_storage(tmp_path / "file" / "sub").make_folder("v1")


def test_reads_of_pieces(tmp_path):
    storage = open_storage(tmp_path)
    storage.put("x", b"0123456789")
    buffer = bytearray(4)
    assert storage.read_into("x", memoryview(buffer), 3) == 4
    assert buffer == b"3456"
    assert storage.read_into("x", memoryview(buffer), 8) == 2
    assert storage.read("x") == b"0123456789"


def test_the_lock_is_held_by_one_at_a_time(tmp_path, monkeypatch):
    storage = open_storage(tmp_path)
    monkeypatch.setattr(local_storage, "_LOCK_SECONDS", 0.05)

    def try_it() -> None:
        with open_storage(tmp_path).lock():
            pass

    def try_in_vain() -> None:
        with pytest.raises(ResourceError, match="locked by another process"):
            try_it()

    entered = threading.Event()

    def enter() -> None:
        try_it()
        entered.set()

    with storage.lock():
        assert run_forked(try_in_vain) == 0
    monkeypatch.setattr(local_storage, "_LOCK_SECONDS", 20.0)
    with storage.lock():
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.is_set()
    waiting.join(20)
    assert entered.is_set()


def test_a_dead_process_holds_no_lock(tmp_path):
    def die_inside() -> None:
        with open_storage(tmp_path).lock():
            os.kill(os.getpid(), 9)

    assert run_forked(die_inside) == -9
    with open_storage(tmp_path).lock():
        pass


def test_a_file_system_without_locks(tmp_path):
    def lockless(operation, /, *args, **kwargs):
        if operation.__name__ == "flock":
            raise OSError(errno.ENOLCK, "No locks available")
        return operation(*args, **kwargs)

    with open_storage(tmp_path, call=lockless).lock():
        pass


@pytest.mark.parametrize(
    ("url", "kind"),
    [("", UsageError), ("nonsense://x/y", UsageError), ("hdfs://x/y", (UnavailableError, UsageError))],
)
def test_urls_that_cannot_be(url, kind):
    with pytest.raises(kind):
        open_storage(url)
