"""The power fails after every call of a save: what was not flushed may be gone, a good one still loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.checkpoint.saving import assert_is, save

from paceline.checkpoint.manifest import CheckpointDamage, DamagedCheckpointError
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import CheckpointStore
from paceline.core.storage.local_storage import LocalStorage
from paceline.core.storage.open_storage import open_storage
from paceline.testing.power_loss import disks_after
from paceline.testing.storage_crash_points import CallRecorder, RecordedCall

KEEP_TWO = Retention(keep_last=2)


def three_saves(folder: Path) -> tuple[list[RecordedCall], list[int]]:
    """All calls of three saves, and how many had been made when each of them had returned."""
    calls = CallRecorder()
    store = CheckpointStore(open_storage(folder, call=calls))
    ends = []
    for step in (1, 2, 3):
        save(store, step, retention=KEEP_TWO)
        ends.append(len(calls.made))
    return calls.made, ends


def steps_after(
    made: list[RecordedCall],
    folder: Path,
    scratch: Path,
    on_damage: Callable[[CheckpointDamage], None] = lambda damage: None,
) -> dict[str, int | None]:
    """The step that loads from each disk that may be left; all of the checkpoint is that step's."""
    found: dict[str, int | None] = {}
    for disk in disks_after(made, str(folder)):
        disk.restore(scratch)
        try:
            good = CheckpointStore(scratch).newest_good(on_damage)
        except DamagedCheckpointError:  # each of them: nothing loads
            good = None
        if good is not None:
            assert_is(good, good.manifest.info.step)
        found[disk.description] = None if good is None else good.manifest.info.step
        shutil.rmtree(scratch)
    return found


def test_after_every_call_of_three_saves(quick_path):
    folder = quick_path / "run"
    made, ends = three_saves(folder)
    disks = 0
    damage: list[CheckpointDamage] = []
    for count in range(len(made) + 1):
        finished = sum(count >= end for end in ends)
        for description, step in steps_after(
            made[:count], folder, quick_path / "left", damage.append
        ).items():
            disks += 1
            # What a save has returned from is never lost; what it has not returned from may be there already.
            allowed = {finished, finished + 1} if finished else {None, 1}
            assert step in allowed, f"after {count} calls ({made[count - 1]}): {description}"
    # A manifest appears after all it names, and goes before it: at no moment is a checkpoint half there.
    assert damage == []
    print(f"{len(made)} calls, {disks} disks")


def without(
    name: str, matches: Callable[[RecordedCall], bool], made: list[RecordedCall]
) -> list[RecordedCall]:
    return [call for call in made if not (call.name == name and matches(call))]


def test_the_model_notices_a_flush_that_is_missing(tmp_path):
    """Without any one kind of fsync the test above would fail: so it tests something."""
    folder = tmp_path / "run"
    made, ends = three_saves(folder)
    made = made[: ends[0]]
    folders = {call.result for call in made if call.name == "open" and "manifest" in str(call.arguments[0])}
    assert folders
    no_flush = without("fsync", lambda call: True, made)
    assert None in steps_after(no_flush, folder, tmp_path / "left").values()

    paths: dict[int, str] = {}
    kept_files, kept_folders = [], []
    for call in made:
        if call.name == "open" and not call.failed:
            paths[call.result] = str(call.arguments[0])
        if call.name != "fsync" or Path(paths[call.arguments[0]]).is_dir():
            kept_folders.append(call)
        if call.name != "fsync" or not Path(paths[call.arguments[0]]).is_dir():
            kept_files.append(call)
    assert None in steps_after(kept_folders, folder, tmp_path / "left").values()
    assert None in steps_after(kept_files, folder, tmp_path / "left").values()
    assert set(steps_after(made, folder, tmp_path / "left").values()) == {1}


def test_a_large_file_past_the_cache_is_flushed_too(tmp_path):
    from paceline.checkpoint.tensor_file import image_memory

    calls = CallRecorder()
    storage = LocalStorage(str(tmp_path / "run"), call=calls)
    storage.make_folder("")
    data = memoryview(image_memory(9 << 20))[: (9 << 20) - 100]
    storage.write("big", data)
    (disk, *_) = disks_after(calls.made, str(tmp_path / "run"))
    assert len(disk.files["big"]) == len(data)


@pytest.mark.parametrize("name", ["latest", "tags.json"])
def test_a_small_file_is_old_or_new_and_never_neither(tmp_path, name):
    calls = CallRecorder()
    storage = LocalStorage(str(tmp_path / "run"), call=calls)
    storage.make_folder("")
    storage.put(name, b"old")
    first = len(calls.made)
    storage.put(name, b"a longer new one")
    for count in range(first, len(calls.made) + 1):
        for disk in disks_after(calls.made[:count], str(tmp_path / "run")):
            assert disk.files[name] in (b"old", b"a longer new one"), disk.description
