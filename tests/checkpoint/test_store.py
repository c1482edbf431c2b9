"""Versions, commits, names, retention: what a store promises."""

from __future__ import annotations

import logging
import math
import shutil

import pytest
import torch
from tests.checkpoint.saving import assert_is, save, state_at, tensors_at, write_part, write_state
from tests.virtual_clock import VirtualClock

from paceline.checkpoint.manifest import (
    CheckpointInfo,
    CheckpointManifest,
    FileRecord,
    folder_name,
    part_name,
    version_of,
)
from paceline.checkpoint.retention import Retention, kept
from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import ConfigError, PlatformError, UsageError


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run")


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_any_number_of_writers(store, parts):
    save(store, 5, parts=parts)
    assert_is(store.open(), 5)
    assert_is(CheckpointStore(store.url).newest_good(), 5)
    assert len(store.manifests()[0].parts) == parts


def test_what_is_not_committed_does_not_exist(store):
    save(store, 1)
    version = store.next_version()
    write_part(store, version, 0, 1, tensors_at(2))
    write_state(store, version, state_at(2))
    assert [manifest.version for manifest in store.manifests()] == [1]
    assert_is(store.newest_good(), 1)
    assert_is(store.open("latest"), 1)
    assert store.verify() == []


def test_nothing_is_there_at_first(store, tmp_path):
    assert store.manifests() == []
    assert store.newest_good() is None
    assert store.verify() == []
    assert store.tags() == {}
    assert store.prune(Retention()) == []
    with pytest.raises(UsageError, match="there is no checkpoint"):
        store.open("latest")
    assert not (tmp_path / "run").exists()


def test_versions_only_grow(store, tmp_path):
    assert save(store, 1).version == 1
    assert store.next_version() == 2  # a save that fails
    assert save(store, 2).version == 3
    shutil.rmtree(tmp_path / "run" / "v00000003")
    shutil.rmtree(tmp_path / "run" / "v00000002")
    again = CheckpointStore(store.url)
    assert save(again, 3).version == 4
    for folder in (tmp_path / "run").glob("v*"):
        shutil.rmtree(folder)
    assert CheckpointStore(store.url).next_version() == 5


def test_versions_of_two_stores_never_meet(store):
    other = CheckpointStore(store.url)
    assert [store.next_version(), other.next_version(), store.next_version()] == [1, 2, 3]


def test_latest_never_goes_back(store):
    first, second = store.next_version(), store.next_version()
    for version in (second, first):
        records = [write_part(store, version, 0, 1, tensors_at(version)), write_state(store, version, {})]
        store.commit(version, records, CheckpointInfo(step=version))
    assert store.open("latest").version == second


def test_the_manifest_says_all(tmp_path):
    store = CheckpointStore(tmp_path / "run", clock=VirtualClock(1_700_000_000.0))
    manifest = save(store, 4, parent=3)
    (read,) = store.manifests()
    assert read == manifest
    assert (read.created, read.info.parent, read.info.step, read.info.samples) == (1_700_000_000.0, 3, 4, 128)
    assert read.nbytes == sum(
        path.stat().st_size
        for path in (tmp_path / "run" / "v00000001").iterdir()
        if path.name != "manifest.json"
    )


def test_metrics_that_json_lacks(store):
    save(store, 1, loss=math.nan)
    save(store, 2, loss=-math.inf)
    first, second = store.manifests()
    assert math.isnan(first.info.metrics["loss"])
    assert second.info.metrics["loss"] == -math.inf
    assert store.find("best") == 2


@pytest.mark.parametrize(
    "files",
    [
        (),
        ("state.json",),
        ("part-00-of-01.safetensors",),
        ("part-00-of-02.safetensors", "state.json"),
        ("part-00-of-01.safetensors", "part-00-of-01.safetensors", "state.json"),
        ("part-00-of-01.safetensors", "state.json", "more.txt"),
        ("part-01-of-02.safetensors", "part-02-of-02.safetensors", "state.json"),
    ],
)
def test_an_incomplete_set_of_files_is_refused(store, files):
    version = store.next_version()
    with pytest.raises(UsageError, match="cannot be committed"):
        store.commit(version, [FileRecord(name, 1, "") for name in files], CheckpointInfo(step=1))
    assert store.manifests() == []


def test_names_that_two_writers_have_are_refused(store):
    version = store.next_version()
    records = [
        FileRecord(part_name(0, 2), 1, "", own=("residual/a",)),
        FileRecord(part_name(1, 2), 1, "", own=("residual/a",)),
        FileRecord("state.json", 1, ""),
    ]
    with pytest.raises(UsageError, match="'residual/a' twice"):
        store.commit(version, records, CheckpointInfo(step=1))


def test_a_part_on_another_hosts_disk_is_noticed(store, tmp_path):
    version = store.next_version()
    elsewhere = CheckpointStore(tmp_path / "elsewhere")
    elsewhere.next_version()
    tensors = tensors_at(1)
    records = [
        write_part(store, version, 0, 2, {"model/bias": tensors["model/bias"]}),
        write_part(elsewhere, version, 1, 2, {"model/weight": tensors["model/weight"]}),
        write_state(store, version, {}),
    ]
    with pytest.raises(PlatformError, match=r"part-01-of-02\.safetensors is not there") as caught:
        store.commit(version, records, CheckpointInfo(step=1))
    assert "every host" in str(caught.value)
    assert store.newest_good() is None


def test_a_file_is_written_once(store):
    version = store.next_version()
    write_part(store, version, 0, 1, tensors_at(1))
    with pytest.raises(PlatformError, match="exists already"):
        write_part(store, version, 0, 1, tensors_at(2))


@pytest.mark.parametrize(
    "info", [{"step": -1}, {"step": 1.0}, {"step": 1, "metrics": {"loss": torch.ones(1)}}]
)
def test_an_info_that_could_not_be_read_back_is_refused(store, info):
    version = store.next_version()
    records = [write_part(store, version, 0, 1, {}), write_state(store, version, {})]
    with pytest.raises(UsageError):
        store.commit(version, records, CheckpointInfo(**info))


def test_a_part_may_be_empty(store):
    version = store.next_version()
    records = [write_part(store, version, 0, 1, {}), write_state(store, version, {})]
    store.commit(version, records, CheckpointInfo(step=1))
    assert store.open().tensors() == {}
    assert store.verify() == []


def test_part_out_of_range(store):
    with pytest.raises(UsageError, match="part 2 of 2"):
        write_part(store, store.next_version(), 2, 2, {})


def test_names(store):
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
        save(store, step, loss=loss)
    store.tag(1, "first")
    assert [store.find(which) for which in (3, "3", "v2", "first", "latest", "best")] == [3, 3, 2, 1, 3, 2]
    assert store.find("best", mode="max") == 1
    assert_is(store.open("first"), 1)
    with pytest.raises(UsageError, match=r"tags: first"):
        store.open("unknown")
    with pytest.raises(UsageError, match="there is no checkpoint 17") as caught:
        store.open(17)
    assert "[1, 2, 3]" in str(caught.value)
    with pytest.raises(UsageError, match="has the metric 'accuracy'"):
        store.find("best", metric="accuracy")
    with pytest.raises(UsageError, match="asked for as a NoneType") as caught:
        store.open(None)
    assert "'latest' or 'best'" in caught.value.remedy


def test_where_nothing_was_saved_there_is_no_best(store):
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        store.find("best")


def test_tags_move_and_go(store):
    for step in (1, 2):
        save(store, step)
    assert store.tag("latest", "good") == 2
    store.tag(1, "good")
    store.tag(1, "other")
    assert store.tags() == {"good": 1, "other": 1}
    store.untag("good")
    assert CheckpointStore(store.url).tags() == {"other": 1}
    with pytest.raises(UsageError, match="no tag 'good'"):
        store.untag("good")
    with pytest.raises(UsageError, match="no checkpoint 9"):
        store.tag(9, "nine")


@pytest.mark.parametrize("name", ["latest", "best", "v12", "12", "", "a/b", "ä", "x" * 65, "-a", "a b"])
def test_names_that_cannot_be_tags(store, name):
    save(store, 1)
    with pytest.raises(UsageError, match="cannot be a tag"):
        store.tag(1, name)


def manifests(*losses: float) -> list[CheckpointManifest]:
    return [
        CheckpointManifest(version, 0.0, CheckpointInfo(step=version, metrics={"loss": loss}), ())
        for version, loss in enumerate(losses, 1)
    ]


@pytest.mark.parametrize(
    ("retention", "protected", "expected"),
    [
        (Retention(keep_last=2), (), {5, 6}),
        (Retention(keep_last=1), (), {6}),
        (Retention(keep_last=99), (), {1, 2, 3, 4, 5, 6}),
        (Retention(keep_last=None), (), {1, 2, 3, 4, 5, 6}),
        (Retention(keep_last=1, keep_best=1), (), {2, 6}),
        (Retention(keep_last=1, keep_best=2), (), {2, 3, 6}),
        (Retention(keep_last=1, keep_best=1, mode="max"), (), {1, 6}),
        (Retention(keep_last=1, keep_best=2, metric="accuracy"), (), {6}),
        (Retention(keep_last=1, keep_every=2), (), {1, 3, 5, 6}),
        (Retention(keep_last=1, keep_every=1), (), {1, 2, 3, 4, 5, 6}),
        (Retention(keep_last=1), (2, 4, 77), {2, 4, 6}),
    ],
)
def test_what_stays(retention, protected, expected):
    losses = (0.9, 0.1, 0.1, math.nan, 0.5, 0.3)
    stay = kept(manifests(*losses), retention, protected)
    if retention.keep_best == 1 and retention.mode == "min":
        expected = {3, 6}  # of equals the newer one
    assert stay == expected


@pytest.mark.parametrize("bad", [{"keep_last": 0}, {"keep_best": -1}, {"keep_every": 0}, {"mode": "most"}])
def test_bad_retention(bad):
    with pytest.raises(ConfigError):
        Retention(**bad)


def test_pruning_keeps_tags_the_latest_and_one_of_every_k_for_ever(store, tmp_path):
    retention = Retention(keep_last=1, keep_best=1, keep_every=4)
    for step in range(1, 11):
        save(store, step, loss=abs(step - 3) + 1, retention=retention)
        if step == 2:
            store.tag("latest", "two")
    assert [manifest.version for manifest in store.manifests()] == [1, 2, 3, 5, 9, 10]
    assert store.verify() == []
    store.untag("two")
    assert store.prune(retention) == [2]


def test_pruning_clears_what_failed_saves_left_and_not_the_one_under_way(store, tmp_path):
    save(store, 1)
    dead = store.next_version()
    write_part(store, dead, 0, 2, tensors_at(2))
    save(store, 3)
    under_way = store.next_version()
    write_part(store, under_way, 0, 2, tensors_at(4))
    assert store.prune(Retention(keep_last=5)) == []
    assert sorted(path.name for path in (tmp_path / "run").glob("v*")) == [
        folder_name(1),
        folder_name(3),
        folder_name(under_way),
    ]


def test_nothing_is_deleted_when_the_tags_are_not_known(store, tmp_path, caplog):
    for step in (1, 2, 3):
        save(store, step)
    store.tag(1, "precious")
    tags = tmp_path / "run" / "tags.json"
    tags.write_bytes(tags.read_bytes().replace(b"precious", b"precioux"))
    with caplog.at_level(logging.WARNING, "paceline"):
        assert store.prune(Retention(keep_last=1)) == []
    assert "tags.json is damaged" in caplog.text
    assert [manifest.version for manifest in store.manifests()] == [1, 2, 3]
    with pytest.raises(PlatformError, match="cannot be changed"):
        store.tag(2, "more")


def test_discard(store, tmp_path):
    save(store, 1)
    version = store.next_version()
    write_part(store, version, 0, 1, tensors_at(2))
    store.discard(version)
    store.discard(version)
    assert not (tmp_path / "run" / folder_name(version)).exists()
    assert store.next_version() == version + 1


@pytest.mark.parametrize("folder", ["v1", "v0000001", "v000000012", "w00000001", "v00000001x", "latest"])
def test_folders_that_are_no_versions(folder):
    assert version_of(folder) is None


def test_folder_names():
    for version in (1, 99_999_999, 123_456_789):
        assert version_of(folder_name(version)) == version
