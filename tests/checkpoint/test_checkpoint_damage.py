"""Bit flips, cuts, additions, deletions and swaps in every file of a checkpoint: detected and named."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.checkpoint.saving import assert_is, save, write_part, write_state

from paceline.checkpoint.manifest import CheckpointDamage, CheckpointInfo, DamagedCheckpointError
from paceline.checkpoint.store import CheckpointStore

FILES = ("part-00-of-02.safetensors", "part-01-of-02.safetensors", "state.json", "manifest.json")


@pytest.fixture
def run(quick_path: Path) -> Path:
    store = CheckpointStore(quick_path / "run")
    save(store, 1)
    save(store, 2)
    return quick_path / "run"


def regions(file: Path) -> Iterator[int]:
    """Every byte of a small file, so every kind of region: length, header, padding, data, digits, quotes."""
    yield from range(file.stat().st_size)


def check(run: Path, file: Path, problem: str) -> None:
    """The damage in the newest checkpoint is named by every way to look, and the older one is used."""
    store = CheckpointStore(run)
    name = str(file.relative_to(run))
    (found,) = store.verify(2)
    assert found.file == name
    assert problem in found.problem, found
    assert any(damage.file == name for damage in store.verify())
    told: list[CheckpointDamage] = []
    assert_is(store.newest_good(told.append), 1)
    assert [damage.file for damage in told] == [name]
    with pytest.raises(DamagedCheckpointError, match=file.name):
        store.open(2)


def flip(file: Path, index: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[index] ^= 1 << bit
    file.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_any_byte(run, name):
    file = run / "v00000002" / name
    good = file.read_bytes()
    store = CheckpointStore(run)
    for index in regions(file):
        flip(file, index, index % 8)
        (found,) = store.verify(2)
        assert found.file == f"v00000002/{name}", index
        assert "damaged" in found.problem
        file.write_bytes(good)
    assert store.verify() == []
    flip(file, len(good) // 2, 3)
    check(run, file, "damaged")


@pytest.mark.parametrize("name", FILES)
def test_a_truncation_to_any_length(run, name):
    file = run / "v00000002" / name
    good = file.read_bytes()
    store = CheckpointStore(run)
    for length in range(len(good)):
        file.write_bytes(good[:length])
        (found,) = store.verify(2)
        assert found.file == f"v00000002/{name}", length
    check(run, file, "damaged" if name == "manifest.json" else "cut off")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("more", [b"\0", b" ", b"{}\n", bytes(5000)])
def test_bytes_too_many(run, name, more):
    file = run / "v00000002" / name
    file.write_bytes(file.read_bytes() + more)
    check(run, file, "damaged" if name == "manifest.json" else "too long")


@pytest.mark.parametrize("name", FILES[:3])
def test_a_file_that_is_gone(run, name):
    file = run / "v00000002" / name
    file.unlink()
    check(run, file, "is missing")


def test_a_manifest_that_is_gone_is_no_checkpoint(run):
    (run / "v00000002" / "manifest.json").unlink()
    store = CheckpointStore(run)
    assert [str(damage) for damage in store.verify()] == ["latest points to version 2, which is not there"]
    assert [str(damage) for damage in store.verify(2)] == ["v00000002/manifest.json is missing"]
    assert_is(store.newest_good(), 1)
    assert_is(store.open("latest"), 1)


def test_swapped_parts_are_recognised(run):
    one, two = run / "v00000002" / FILES[0], run / "v00000002" / FILES[1]
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    problems = {damage.file: damage.problem for damage in CheckpointStore(run).verify(2)}
    assert problems.keys() == {f"v00000002/{name}" for name in FILES[:2]}
    assert_is(CheckpointStore(run).newest_good(lambda damage: None), 1)


def test_a_file_of_the_same_size_from_another_checkpoint(run):
    shutil.copy(run / "v00000001" / FILES[0], run / "v00000002" / FILES[0])
    check(run, run / "v00000002" / FILES[0], "checksum")


def test_a_part_with_the_content_of_another_is_recognised(tmp_path):
    store = CheckpointStore(tmp_path / "equal")
    version = store.next_version()
    records = [write_part(store, version, part, 2, {f"t{part}": torch.full((3,), part)}) for part in (0, 1)]
    store.commit(version, [*records, write_state(store, version, {})], CheckpointInfo(step=1))
    folder = tmp_path / "equal" / "v00000001"
    (folder / FILES[0]).write_bytes((folder / FILES[1]).read_bytes())
    (found,) = store.verify(1)
    assert found.problem == "holds what part-01-of-02.safetensors should hold"


def test_folders_that_changed_places(run):
    (run / "v00000001").rename(run / "aside")
    (run / "v00000002").rename(run / "v00000001")
    (run / "aside").rename(run / "v00000002")
    problems = [str(damage) for damage in CheckpointStore(run).verify()]
    assert problems == [
        "v00000001/manifest.json belongs to version 2, not to 1",
        "v00000002/manifest.json belongs to version 1, not to 2",
    ]
    with pytest.raises(DamagedCheckpointError, match="each of the 2 checkpoints"):
        CheckpointStore(run).newest_good(lambda damage: None)


def test_a_stranger_in_the_folder_is_told_and_does_no_harm(run):
    (run / "v00000002" / "core.1234").write_bytes(b"x")
    store = CheckpointStore(run)
    assert [str(damage) for damage in store.verify(2)] == ["v00000002/core.1234 is not in the manifest"]
    assert_is(store.newest_good(lambda damage: None), 2)


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.write_bytes(b""),
        lambda file: flip(file, 14, 0),
        lambda file: file.write_bytes(file.read_bytes()[:-3]),
        lambda file: file.write_bytes(b"12"),
    ],
)
def test_a_damaged_latest_is_named_and_not_needed(run, caplog, harm: Callable[[Path], object]):
    harm(run / "latest")
    store = CheckpointStore(run)
    (found,) = store.verify()
    assert found.file == "latest"
    assert_is(store.newest_good(), 2)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert_is(store.open("latest"), 2)
    assert "latest is" in caplog.text
    assert save(store, 3).version == 3
    assert store.verify() == []


def test_a_latest_of_another_manifest_is_named(run, tmp_path):
    """A whole checkpoint of another run, put in the place of ours."""
    other = CheckpointStore(tmp_path / "other")
    for step in (7, 8):
        save(other, step)
    shutil.rmtree(run / "v00000002")
    shutil.copytree(tmp_path / "other" / "v00000002", run / "v00000002")
    (found,) = CheckpointStore(run).verify()
    assert str(found) == "latest was written for another v00000002/manifest.json than the one that is there"


def test_a_folder_in_the_place_of_a_file_is_damage(run):
    part = run / "v00000002" / FILES[0]
    part.unlink()
    part.mkdir()
    (found,) = CheckpointStore(run).verify(2)
    assert found.file == f"v00000002/{FILES[0]}"
    assert_is(CheckpointStore(run).newest_good(lambda damage: None), 1)


def test_when_all_are_damaged_that_is_an_error_with_the_list(run, caplog):
    for version in (1, 2):
        flip(run / f"v{version:08d}" / "state.json", 0, 1)
    with (
        caplog.at_level(logging.WARNING, "paceline"),
        pytest.raises(DamagedCheckpointError, match="each of the 2 checkpoints") as caught,
    ):
        CheckpointStore(run).newest_good()
    for text in (caplog.text, str(caught.value)):
        assert "v00000001/state.json" in text
        assert "v00000002/state.json" in text


def test_the_error_names_every_file(run):
    for name in FILES[:3]:
        (run / "v00000002" / name).unlink()
    with pytest.raises(DamagedCheckpointError) as caught:
        CheckpointStore(run).open(2)
    assert len(caught.value.damage) == 3
    assert all(name in str(caught.value) for name in FILES[:3])
    assert "resume='auto'" in str(caught.value)
