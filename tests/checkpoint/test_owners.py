"""Several runs' checkpoints in one place: whose they are, and who may delete them."""

from __future__ import annotations

import uuid

import pytest
from tests.checkpoint.saving import state_at, tensors_at, write_part, write_state

from paceline.checkpoint.manifest import CheckpointInfo, FileRecord
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import PlatformError, UsageError


@pytest.fixture(params=["folder", "memory"])
def url(request, tmp_path) -> str:
    return str(tmp_path) if request.param == "folder" else f"memory://{uuid.uuid4().hex}"


def written(store: CheckpointStore, version: int, step: int) -> list[FileRecord]:
    return [
        write_part(store, version, 0, 1, tensors_at(step)),
        write_state(store, version, state_at(step)),
    ]


def save(store: CheckpointStore, step: int, run: str, **metrics: float) -> int:
    version = store.next_version(run)
    store.commit(version, written(store, version, step), CheckpointInfo(step=step, run=run, metrics=metrics))
    return version


def test_a_run_deletes_only_its_own(url):
    store = CheckpointStore(url)
    theirs = [save(store, step, "other") for step in range(3)]
    mine = [save(store, step, "mine") for step in range(3)]
    assert store.prune(Retention(keep_last=1), run="mine") == mine[:2]
    assert [manifest.version for manifest in store.manifests()] == [*theirs, mine[2]]
    assert [manifest.info.run for manifest in store.manifests()] == ["other"] * 3 + ["mine"]
    assert store.verify() == []


def test_what_another_run_is_still_writing_stays():
    url = f"memory://{uuid.uuid4().hex}"
    theirs, mine = CheckpointStore(url), CheckpointStore(url)
    under_way = theirs.next_version("other")
    records = written(theirs, under_way, 1)
    save(mine, 1, "mine")
    left_behind = mine.next_version("mine")
    save(mine, 2, "mine")
    assert mine.prune(Retention(keep_last=1), run="mine") == [under_way + 1]
    assert mine.storage.names(f"v{left_behind:08d}") == []
    theirs.commit(under_way, records, CheckpointInfo(step=1, run="other"))
    assert theirs.verify(under_way) == []


def test_of_two_that_take_one_version_only_one_commits():
    url = f"memory://{uuid.uuid4().hex}"
    first, second = CheckpointStore(url), CheckpointStore(url)
    version = first.next_version("first")
    records = written(first, version, 1)
    # As if both had looked at the same moment.
    second.storage.put(f"v{version:08d}/owner.json", _owner_of(second))
    with pytest.raises(PlatformError, match="another run saves to"):
        first.commit(version, records, CheckpointInfo(step=1, run="first"))
    assert second.next_version("second") == version + 1


def _owner_of(store: CheckpointStore) -> bytes:
    elsewhere = CheckpointStore(f"memory://{uuid.uuid4().hex}")
    return elsewhere.storage.read(f"v{elsewhere.next_version('x'):08d}/owner.json")


def test_the_best_are_those_that_have_the_metric(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 1, "run", loss=0.5)
    for step in range(2, 5):
        save(store, step, "run", train_loss=0.1)
    assert store.prune(Retention(keep_last=1, keep_best=1), run="run") == [2, 3]
    assert store.find("best") == 1
    with pytest.raises(UsageError, match=r"(?s)has the metric 'acuracy'.*there are \['loss', 'train_loss'\]"):
        store.find("best", metric="acuracy")
