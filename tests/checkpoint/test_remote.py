"""Other places: memory, and a real S3 server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.checkpoint.remote_servers import KEEPS_CONNECTIONS
from tests.checkpoint.saving import assert_is, finished, save, state_at, tensors_at, write_part, write_state
from tests.waiting import wait_for

from paceline.checkpoint.manifest import CheckpointInfo, DamagedCheckpointError
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter
from paceline.core.errors import PlatformError
from paceline.testing.storage_crash_points import CallRecorder

KEY, SECRET = "paceline", "paceline-secret"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a bucket on a server that speaks S3; fsspec finds it through its settings."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    rclone = shutil.which("rclone", path=f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}")
    if rclone is None:
        pytest.skip("rclone is not installed")
    root: Path = tmp_path_factory.mktemp("s3")
    (root / "bucket").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        rclone,
        "serve",
        "s3",
        str(root),
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{KEY},{SECRET}",
    ]
    server = subprocess.Popen([*command, "--vfs-cache-mode", "off"], stderr=subprocess.DEVNULL)
    _wait_for(port, server)
    options = {"key": KEY, "secret": SECRET, "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
    before = dict(fsspec.config.conf)
    fsspec.config.conf["s3"] = options
    yield f"s3://bucket/{uuid.uuid4().hex}"
    fsspec.config.conf.clear()
    fsspec.config.conf.update(before)
    server.send_signal(signal.SIGTERM)
    server.wait(10)


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    def answers() -> bool:
        assert server.poll() is None, "the server ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(answers, "the server does not answer")


@pytest.fixture(params=["memory", pytest.param("s3", marks=KEEPS_CONNECTIONS)])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    return f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}"


def test_everything_that_a_disk_does(url):
    store = CheckpointStore(url)
    assert store.newest_good() is None
    assert store.manifests() == []
    retention = Retention(keep_last=2)
    for step in range(1, 5):
        save(store, step, retention=retention)
        if step == 1:
            store.tag("latest", "first")
    again = CheckpointStore(url)
    assert [manifest.version for manifest in again.manifests()] == [1, 3, 4]
    assert again.tags() == {"first": 1}
    assert again.verify() == []
    assert_is(again.newest_good(), 4)
    assert_is(again.open("first"), 1)
    assert again.next_version() == 5
    again.untag("first")
    assert again.prune(retention) == [1]
    again.discard(4)
    assert_is(again.newest_good(), 3)
    assert CheckpointStore(url).next_version() >= 5


def test_damage_is_named(url):
    store = CheckpointStore(url)
    for step in (1, 2):
        save(store, step)
    files = fsspec.core.url_to_fs(url)[0]
    part = f"{fsspec.core.url_to_fs(url)[1]}/v00000002/part-00-of-02.safetensors"
    data = files.cat_file(part)
    for broken, problem in (
        (data[:-1], "cut off"),
        (data + b"x", "too long"),
        (data[:-1] + b"\x55", "damaged"),
    ):
        files.pipe_file(part, broken)
        (found,) = CheckpointStore(url).verify(2)
        assert found.file == "v00000002/part-00-of-02.safetensors"
        assert problem in found.problem
        assert_is(CheckpointStore(url).newest_good(lambda damage: None), 1)
    files.rm_file(part)
    with pytest.raises(DamagedCheckpointError, match=r"part-00-of-02\.safetensors is missing"):
        CheckpointStore(url).open(2)


def test_in_the_background(url):
    with BackgroundWriter(CheckpointStore(url)) as writer:
        version = writer.store.next_version()
        writer.save(version, tensors_at(1), state_at(1))
        done = finished(writer)
        assert done.error is None
        writer.commit(version, done.records, CheckpointInfo(step=1))
        assert finished(writer).error is None
    assert_is(CheckpointStore(url).newest_good(), 1)


@KEEPS_CONNECTIONS
def test_several_uploads_of_one_file(s3, monkeypatch):
    """More than one part of a multipart upload, and several ranges of a read."""
    import torch

    from paceline.core.storage import remote_storage

    monkeypatch.setattr(remote_storage, "_CHUNK", 5 << 20)
    url = f"{s3}/{uuid.uuid4().hex}"
    store = CheckpointStore(url)
    tensors = {"model/large": torch.arange(3 << 20)}
    version = store.next_version()
    records = [write_part(store, version, 0, 1, tensors), write_state(store, version, {})]
    store.commit(version, records, CheckpointInfo(step=1))
    assert torch.equal(CheckpointStore(url).open().tensors()["model/large"], tensors["model/large"])
    assert store.verify() == []


def test_a_failing_upload_leaves_no_file(url):
    calls = CallRecorder()

    def failing(operation, /, *args, **kwargs):
        if operation.__name__ == "close":
            raise OSError("the connection broke")
        return calls(operation, *args, **kwargs)

    from paceline.core.storage.open_storage import open_storage

    store = CheckpointStore(open_storage(url, call=failing))
    version = store.next_version()
    with pytest.raises(PlatformError, match="the connection broke"):
        write_part(store, version, 0, 1, tensors_at(1))
    assert CheckpointStore(url).storage.names(f"v{version:08d}") == ["owner.json"]


@KEEPS_CONNECTIONS
def test_the_key_is_checked(s3):
    storage_options = {**fsspec.config.conf["s3"], "secret": "wrong"}
    before = fsspec.config.conf["s3"]
    fsspec.config.conf["s3"] = storage_options
    try:
        with pytest.raises(PlatformError, match=r"cannot be listed: .*signature"):
            save(CheckpointStore(f"{s3}/denied"), 1)
    finally:
        fsspec.config.conf["s3"] = before
