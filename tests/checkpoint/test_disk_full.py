"""A disk that is really full: a small tmpfs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoint.saving import assert_is, finished, save, state_at, tensors_at

from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter
from paceline.core.errors import ResourceError

SIZE = 6 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def free(disk: Path) -> int:
    status = os.statvfs(disk)
    return status.f_bavail * status.f_frsize


@pytest.mark.parametrize("megabytes", [2, 5, 20])
def test_a_save_that_does_not_fit(small_disk, megabytes):
    """Buffered and past the cache, a little and much too large: told, removed, and training could go on."""
    store = CheckpointStore(small_disk / "checkpoints")
    save(store, 1)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(free(small_disk) - (1 << 20)))
    before = free(small_disk)
    with BackgroundWriter(store) as writer:
        version = store.next_version()
        writer.save(version, {"model/large": torch.ones(megabytes << 18)}, state_at(2))
        done = finished(writer)
        assert isinstance(done.error, ResourceError)
        assert "No space left on device" in str(done.error)
        assert "part-00-of-01.safetensors" in str(done.error)
        assert "keep fewer checkpoints" in str(done.error)
        assert os.listdir(small_disk / "checkpoints" / f"v{version:08d}") == []
        writer.discard(version)
        assert finished(writer).error is None
        assert free(small_disk) == before
        assert_is(store.newest_good(), 1)
        assert store.verify() == []
        # Space comes back, and so do checkpoints.
        filler.unlink()
        version = store.next_version()
        writer.save(version, tensors_at(3), state_at(3))
        writer.commit(version, finished(writer).records, CheckpointInfo(step=3), Retention(keep_last=1))
        assert finished(writer).error is None
    assert_is(store.newest_good(), 3)


def test_every_amount_of_space_that_is_too_little(small_disk):
    """One more page free each time: whatever file it is that does not fit, the older checkpoint stays."""
    store = CheckpointStore(small_disk / "checkpoints")
    save(store, 1)
    filler = small_disk / "filler"
    page, pages = os.sysconf("SC_PAGESIZE"), 0
    failures = []
    while True:
        filler.write_bytes(bytes(free(small_disk) - pages * page))
        try:
            save(store, 2)
        except ResourceError as error:
            failures.append(str(error).split(" cannot")[0].rsplit("/", 1)[-1])
        else:
            break
        finally:
            filler.unlink()
        for folder in (small_disk / "checkpoints").glob("v*"):
            assert not [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]
        assert_is(store.newest_good(), 2 if failures[-1] == "latest" else 1)
        assert store.verify() == []
        pages += 1
    assert {name.split("-")[0] for name in failures} >= {"part", "state.json", "manifest.json"}
    assert_is(store.newest_good(), 2)
