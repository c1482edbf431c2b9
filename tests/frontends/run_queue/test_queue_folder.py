"""The queue on disk: what is written is read, damage and intrusion are named, a full disk loses nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from tests.frontends.run_queue.queue_parts import request
from tests.virtual_clock import VirtualClock
from tests.waiting import wait_for

from paceline.core import atomic_file
from paceline.core.errors import PlatformError, UsageError
from paceline.frontends.run_queue import queue_client
from paceline.frontends.run_queue.queue_folder import QueueFolder, WakeUps
from paceline.frontends.run_queue.queued_run import QueueContent


@pytest.fixture
def folder(tmp_path):
    return QueueFolder.at(str(tmp_path / "queue"))


def test_what_is_added_is_read_by_others(folder, tmp_path):
    first = queue_client.add_run(folder, request(tmp_path, environment={"A": "b"}, arguments=("--lr", "1")))
    second = queue_client.add_run(folder, request(tmp_path, run_dir=""))
    assert QueueFolder(folder.path).read().runs == (first, second)
    assert (first.id, second.id) == (1, 2)
    assert second.request.run_dir.startswith(f"{tmp_path}/runs/")
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    assert os.stat(folder.file).st_mode & 0o777 == 0o600


def test_two_new_runs_never_share_a_folder(folder, tmp_path):
    runs = [queue_client.add_run(folder, request(tmp_path, run_dir="")) for _ in range(3)]
    assert len({run.request.run_dir for run in runs}) == 3
    with pytest.raises(UsageError, match=r"is the folder of run 1 \(train\), which has not ended"):
        queue_client.add_run(folder, request(tmp_path, run_dir=runs[0].request.run_dir))


def test_numbers_are_never_used_twice(folder, tmp_path):
    run = queue_client.add_run(folder, request(tmp_path))
    queue_client.want(folder, "1", "cancel")
    assert queue_client.forget(folder, lambda run: True)[0].id == run.id
    assert queue_client.add_run(folder, request(tmp_path)).id == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is empty"),
        (b"{", "is damaged or cut off"),
        (b'{"runs": []}', "has no checksum"),
        (None, "does not match its own checksum"),
    ],
)
def test_a_damaged_file_is_named_and_left_alone(folder, tmp_path, text, said):
    queue_client.add_run(folder, request(tmp_path))
    text = folder.file.read_bytes().replace(b"train", b"trail") if text is None else text
    folder.file.write_bytes(text)
    with pytest.raises(PlatformError, match=said) as caught:
        queue_client.add_run(folder, request(tmp_path, run_dir="/other"))
    assert str(folder.file) in caught.value.message
    assert "--run-dir" in caught.value.remedy
    assert folder.file.read_bytes() == text


@pytest.mark.parametrize("body", [{"format": 2}, {"format": 1, "runs": [{"id": "x"}]}])
def test_a_file_of_another_version_is_refused(folder, body):
    from paceline.checkpoint.checksummed_json import encode_document

    folder.file.write_bytes(encode_document(body))
    with pytest.raises(PlatformError, match=r"queue\.json"):
        folder.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")
def test_the_queue_of_another_user_is_refused(folder):
    os.chown(folder.path, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        QueueFolder.at(str(folder.path))
    os.chown(folder.path, 0, 0)
    folder.change(lambda content: replace(content, capacity=2))
    os.chown(folder.file, 12345, 12345)
    with pytest.raises(UsageError, match=r"belongs to another user: .*queue\.json"):
        QueueFolder.at(str(folder.path))


def test_a_queue_that_others_may_write_to_is_refused(folder):
    folder.path.chmod(0o770)
    with pytest.raises(UsageError, match="other users may write to") as caught:
        QueueFolder.at(str(folder.path))
    assert "chmod go-w" in caught.value.remedy


def test_a_file_in_the_place_of_the_queue(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PlatformError, match="cannot be made: File exists"):
        QueueFolder.at(str(tmp_path / "file"))


def test_the_folder_of_the_environment_and_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_QUEUE", str(tmp_path / "named"))
    assert QueueFolder.at(None).path == tmp_path / "named"
    monkeypatch.delenv("PACELINE_QUEUE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert QueueFolder.at(None).path == tmp_path / "state" / "paceline" / "queue"


def test_a_full_disk_leaves_the_queue_as_it_was(folder, tmp_path, monkeypatch):
    queue_client.add_run(folder, request(tmp_path))
    before = folder.read()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "replace", full)
        with pytest.raises(PlatformError, match="No space left on device; the queue stays as it was"):
            queue_client.add_run(folder, request(tmp_path, run_dir="/other"))
    assert folder.read() == before


def test_a_change_that_raises_writes_nothing(folder):
    def refuse(content: QueueContent) -> QueueContent:
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        folder.change(refuse)
    assert not folder.file.exists()


def test_commands_at_once_lose_nothing(folder, tmp_path):
    def add(number: int) -> None:
        for turn in range(5):
            queue_client.add_run(folder, request(tmp_path, run_dir=f"/runs/{number}-{turn}"))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.id for run in folder.read().runs) == list(range(1, 21))


def test_a_command_that_hangs_with_the_lock_is_reported(tmp_path):
    clock = VirtualClock(autojump=True)
    folder = QueueFolder(QueueFolder.at(str(tmp_path / "queue")).path, clock)
    with open(folder.lock_file, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PlatformError, match=r"has held .*lock for 30 s"):
            folder.change(lambda content: content)


def test_one_server_at_a_time(folder):
    with folder.serving():
        assert folder.is_served
        with pytest.raises(UsageError, match="is in use: process") as caught, folder.serving():
            pass
        assert "one server is enough" in caught.value.remedy
    assert not folder.is_served


def test_a_call_wakes_the_server(folder):
    folder.wake()  # no server, no pipe: nothing happens
    with folder.serving():
        folder.wake()
        wakes = WakeUps(folder)
        thread = threading.Thread(target=wakes.wait, args=(60.0,))
        thread.start()

        def is_awake() -> bool:
            folder.wake()
            return not thread.is_alive()

        wait_for(is_awake)
        thread.join()
        wakes.wait(0.0)
        wakes.close()


def test_the_lock_of_a_killed_command_is_free(folder):
    program = (
        "import sys, time\n"
        "from paceline.frontends.run_queue.queue_folder import QueueFolder\n"
        "with QueueFolder.at(sys.argv[1]).locked():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder.path)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.kill()
    folder.change(lambda content: replace(content, capacity=3))
    assert folder.read().capacity == 3
