"""Damage: every flipped bit and every cut is found and named, mended where a replica can, never used."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from paceline.core.errors import UsageError
from paceline.core.storage.storage import Storage
from paceline.data.checked import (
    CheckedShards,
    CorruptShardError,
    ShardManifest,
    repair,
    verify,
    write_shards,
)
from paceline.data.checked.shard_format import entry_at, index_bytes
from paceline.data.sources import Request, SkippedSampleError, as_source, read

COUNT, PER_SHARD = 10, 4


def sample(number: int) -> Any:
    return {"x": torch.arange(40.0) + number, "n": number}


def write(folder: Path) -> Path:
    write_shards([sample(i) for i in range(COUNT)], folder, samples_per_shard=PER_SHARD)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data")


@pytest.fixture
def replica(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "replica"))


def shard(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.plshard"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    octets = bytearray(path.read_bytes())
    octets[offset] ^= 1 << bit
    path.write_bytes(octets)


def truncate(path: Path, length: int) -> None:
    os.truncate(path, length)


def record_span(folder: Path, sample_number: int) -> tuple[Path, int, int]:
    manifest = ShardManifest.from_json((folder / "manifest.json").read_bytes())
    number, record = manifest.locate(sample_number)
    about = manifest.shards[number]
    octets = shard(folder, number).read_bytes()
    entry = entry_at(octets[about.bytes - index_bytes(about.samples) :], record)
    return shard(folder, number), entry.offset, entry.length


def outcome(shards: CheckedShards, number: int) -> str:
    """ "right" or the kind of error; a wrong sample would be the one thing that must not be."""
    try:
        found = shards[number]
    except CorruptShardError as error:
        return str(error)
    assert torch.equal(found["x"], sample(number)["x"])
    assert found["n"] == number
    return "right"


def test_a_flipped_bit_at_every_byte_of_a_file_is_found_and_never_read(data: Path) -> None:
    path = shard(data, 2)
    size = path.stat().st_size
    good = path.read_bytes()
    named = {"record": 0, "index": 0, "outside": 0}
    for offset in range(size):
        flip(path, offset, offset % 8)
        (first, *more) = verify(data)
        assert first.shard == 2
        assert first.file == path.name
        assert not more
        kind = (
            "record" if first.record is not None else "index" if "index is not" in first.reason else "outside"
        )
        named[kind] += 1
        shards = CheckedShards(data)
        outcomes = [outcome(shards, 8), outcome(shards, 9)]
        if kind == "record":
            assert [o == "right" for o in outcomes] == [first.record != 0, first.record != 1]
            assert f"record {first.record} of shard 2, {path.name}" in outcomes[first.record or 0]
        elif kind == "index":
            assert all("the checksum of its index" in o and path.name in o for o in outcomes)
        else:
            assert outcomes == ["right", "right"]
        path.write_bytes(good)
    assert named["index"] == index_bytes(2)
    assert named["record"] > 400
    assert named["outside"] == size - named["index"] - named["record"] < 200
    assert verify(data) == []


def test_a_file_cut_at_every_length_is_found_and_never_read(data: Path) -> None:
    path = shard(data, 2)
    good = path.read_bytes()
    for length in range(0, len(good), 7):
        path.write_bytes(good[:length])
        (damage,) = verify(data)
        assert f"has {length} bytes and was written with {len(good)}" in damage.reason
        shards = CheckedShards(data)
        for number in (8, 9):
            assert "cut short" in outcome(shards, number) or "checksum" in outcome(shards, number)
        assert outcome(shards, 0) == "right"
    path.write_bytes(good + b"\0")
    assert "bytes and was written with" in verify(data)[0].reason


def test_a_flipped_bit_at_every_byte_of_the_manifest_is_found(tmp_path: Path) -> None:
    data = tmp_path
    write_shards(range(2), data)
    path = data / "manifest.json"
    good = path.read_bytes()
    manifest = ShardManifest.from_json(good)
    harmless = 0
    for offset in range(len(good)):
        flip(path, offset, offset % 7)
        damage = verify(data)
        if damage:
            assert [one.file for one in damage] == ["manifest.json"]
            with pytest.raises(CorruptShardError, match=r"manifest\.json"):
                CheckedShards(data)
        else:
            # A blank that became another kind of blank says the same.
            assert CheckedShards(data).manifest == manifest
            assert chr(good[offset]).isspace()
            harmless += 1
        path.write_bytes(good)
    assert harmless < len(good) // 5
    for length in range(0, len(good) - 2, 13):
        path.write_bytes(good[:length])
        with pytest.raises(CorruptShardError, match=r"manifest\.json"):
            CheckedShards(data)


def test_a_missing_manifest(data: Path, replica: Path, caplog: pytest.LogCaptureFixture) -> None:
    (data / "manifest.json").unlink()
    with pytest.raises(CorruptShardError, match="not a checked dataset, or writing it has not ended"):
        CheckedShards(data)
    assert outcome(CheckedShards(data, replicas=[replica]), 3) == "right"
    assert "used the copy at" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda plain: plain.update(version=2),
        lambda plain: plain.update(format="other"),
        lambda plain: plain["shards"][0].update(file="../../etc/passwd"),
        lambda plain: plain["shards"][0].pop("bytes"),
        lambda plain: plain.update(samples=11),
        lambda plain: plain.pop("shards"),
        lambda plain: plain.update(shards=5),
        lambda plain: plain["shards"][0].update(samples=-1),
        lambda plain: plain["shards"][0].update(bytes="many"),
    ],
)
def test_a_manifest_that_is_whole_and_wrong(data: Path, change: Any) -> None:
    from paceline.data.checked import shard_manifest

    plain = json.loads((data / "manifest.json").read_bytes())
    plain.pop("checksum")
    change(plain)
    plain["checksum"] = shard_manifest.own_checksum(plain)
    (data / "manifest.json").write_text(json.dumps(plain))
    with pytest.raises(CorruptShardError, match=r"manifest\.json"):
        CheckedShards(data)


def test_the_manifest_of_another_dataset(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_shards([sample(i + 1) for i in range(COUNT)], other, samples_per_shard=PER_SHARD)
    shutil.copy(other / "manifest.json", data / "manifest.json")
    assert {damage.shard for damage in verify(data)} == {0, 1, 2}
    shards = CheckedShards(data)
    assert all("or this is another file" in outcome(shards, number) for number in range(COUNT))


def test_shards_that_changed_places(data: Path) -> None:
    first, second = shard(data, 0), shard(data, 1)
    first.rename(data / "x"), second.rename(first), (data / "x").rename(second)
    assert {damage.shard for damage in verify(data)} == {0, 1}
    shards = CheckedShards(data)
    assert ["another file" in outcome(shards, number) for number in range(COUNT)] == [True] * 8 + [False] * 2


def test_records_that_changed_places(data: Path) -> None:
    path, first, length = record_span(data, 0)
    _, second, _ = record_span(data, 1)
    octets = bytearray(path.read_bytes())
    octets[first : first + length], octets[second : second + length] = (
        octets[second : second + length],
        octets[first : first + length],
    )
    path.write_bytes(octets)
    assert [(damage.shard, damage.record) for damage in verify(data)] == [(0, 0), (0, 1)]


def test_a_missing_file(data: Path, replica: Path) -> None:
    shard(data, 1).unlink()
    assert ["cannot be read" in damage.reason for damage in verify(data)] == [True]
    assert "FileNotFoundError" in outcome(CheckedShards(data), 5)
    assert outcome(CheckedShards(data, replicas=[replica]), 5) == "right"


def test_the_error_carries_the_facts(data: Path, replica: Path) -> None:
    for folder in (data, replica):
        path, offset, _ = record_span(folder, 6)
        flip(path, offset + 70)
    with pytest.raises(CorruptShardError) as caught:
        CheckedShards(data, replicas=[replica])[6]
    error = caught.value
    assert error.facts == {"sample": 6, "shard": 1, "record": 2, "file": "shard-000001.plshard"}
    assert [damage.url for damage in error.damage] == [str(data), str(replica)]
    assert all((damage.shard, damage.record) == (1, 2) for damage in error.damage)
    assert "replicas" in error.remedy
    assert "skip-and-report" in error.remedy


def test_a_replica_stands_in_and_it_is_said(
    data: Path, replica: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, offset, length = record_span(data, 3)
    flip(path, offset + length - 1)
    # Different places are damaged at the two.
    other, start, _ = record_span(replica, 4)
    flip(other, start)
    shards = CheckedShards(data, replicas=[replica])
    assert [outcome(shards, number) for number in range(COUNT)] == ["right"] * COUNT
    assert f"record 3 of shard 0 ({data}/shard-000000.plshard)" in caplog.text
    assert f"used the copy at {replica}" in caplog.text
    assert shards.skipped == ()


def test_a_replica_that_is_another_dataset_is_not_believed(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_shards([sample(i + 1) for i in range(COUNT)], other, samples_per_shard=PER_SHARD)
    flip(*record_span(data, 3)[:2])
    assert "record 3 of shard 0" in outcome(CheckedShards(data, replicas=[other]), 3)


def test_a_read_that_went_wrong_once_is_read_again(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = Storage.read_range, []

    def unsteady(self: Storage, name: str, start: int, length: int, *, fresh: bool = False) -> bytearray:
        asked.append(fresh)
        octets = real(self, name, start, length, fresh=fresh)
        if not fresh and name.endswith(".plshard"):
            octets[len(octets) // 2] ^= 1
        return octets

    monkeypatch.setattr(Storage, "read_range", unsteady)
    assert outcome(CheckedShards(data), 3) == "right"
    assert asked == [False, False, True, False, True]


@pytest.mark.parametrize("workers", [0, 2])
def test_skip_and_report(data: Path, caplog: pytest.LogCaptureFixture, workers: int) -> None:
    flip(*record_span(data, 3)[:2])
    shard(data, 2).unlink()
    shards = CheckedShards(data, on_corrupt="skip-and-report")
    source = as_source(DataLoader(shards, num_workers=workers))
    requests = [
        Request((0,), np.array([0, 3, 5])),
        Request((1,), np.array([8, 9])),
        Request((2,), np.array([3, 1])),
    ]
    batches = list(read(source, requests))
    assert [batch.count for batch in batches] == [2, 0, 1]
    assert batches[0].data["n"].tolist() == [0, 5]
    assert batches[1].data is None
    assert [[skipped.index for skipped in batch.skipped] for batch in batches] == [[3], [8, 9], [3]]
    assert "record 3 of shard 0, shard-000000.plshard" in batches[0].skipped[0].reason
    if not workers:
        assert [skipped.index for skipped in shards.skipped] == [3, 8, 9]
        # Each is reported once, however often it is asked for.
        assert [record.levelno for record in caplog.records] == [logging.ERROR] * 3


def test_skipping_reaches_through_other_datasets(data: Path) -> None:
    flip(*record_span(data, 3)[:2])
    shards = CheckedShards(data, on_corrupt="skip-and-report")
    batch = as_source(Subset(shards, [2, 3, 4])).fetch(np.arange(3))
    assert batch.data["n"].tolist() == [2, 4]
    assert [skipped.index for skipped in batch.skipped] == [1]
    with pytest.raises(SkippedSampleError):
        shards[3]


def test_failing_is_the_default_in_a_batch_too(data: Path) -> None:
    flip(*record_span(data, 3)[:2])
    for workers in (0, 1):
        source = as_source(DataLoader(CheckedShards(data), num_workers=workers))
        with pytest.raises(CorruptShardError, match=r"sample 3 \(record 3 of shard 0") as caught:
            list(read(source, [Request((0,), np.array([1, 3]))]))
        assert caught.value.damage[0].record == 3


def test_mending_from_replicas(data: Path, replica: Path) -> None:
    flip(*record_span(data, 3)[:2])
    truncate(shard(data, 1), 100)
    shard(data, 2).unlink()
    (data / "manifest.json").write_bytes(b"{}")
    assert repair(data, [replica]) == []
    assert verify(data) == []
    assert [path.read_bytes() for path in sorted(data.iterdir())] == [
        path.read_bytes() for path in sorted(replica.iterdir())
    ]


def test_what_cannot_be_mended_is_named_and_left(data: Path, replica: Path) -> None:
    for folder in (data, replica):
        flip(*record_span(folder, 3)[:2])
    flip(*record_span(data, 5)[:2])
    before = shard(data, 0).read_bytes()
    assert [(damage.shard, damage.record) for damage in repair(data, [replica])] == [(0, 3)]
    assert shard(data, 0).read_bytes() == before
    assert outcome(CheckedShards(data), 5) == "right"


def test_damage_behind_another_file_system(data: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        for place in ("a", "b"):
            write_shards([sample(i) for i in range(COUNT)], f"memory://{place}", samples_per_shard=PER_SHARD)
        octets = bytearray(memory.cat("/a/shard-000000.plshard"))
        octets[100] ^= 4
        memory.pipe("/a/shard-000000.plshard", bytes(octets))
        memory.rm("/a/shard-000001.plshard")
        assert [(damage.shard, damage.record) for damage in verify("memory://a")] == [(0, 0), (1, None)]
        assert "record 0 of shard 0" in outcome(CheckedShards("memory://a"), 0)
        shards = CheckedShards("memory://a", replicas=["memory://b"])
        assert [outcome(shards, number) for number in range(COUNT)] == ["right"] * COUNT
        assert repair("memory://a", ["memory://b"]) == []
    finally:
        memory.rm("/a", recursive=True)
        memory.rm("/b", recursive=True)


def test_bad_settings(data: Path) -> None:
    with pytest.raises(UsageError, match="on_corrupt='ignore'"):
        CheckedShards(data, on_corrupt="ignore")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="replicas="):
        CheckedShards(data, replicas="copy")
