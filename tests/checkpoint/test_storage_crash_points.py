"""The process is killed before, after and in the middle of every file-system call of a save."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest
from tests.checkpoint.saving import assert_is, finished, save, state_at, tensors_at

from paceline.checkpoint.manifest import CheckpointInfo
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.store import LATEST, CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter
from paceline.core.storage.open_storage import open_storage
from paceline.testing.storage_crash_points import (
    CallRecorder,
    CrashPoint,
    Killer,
    RecordedCall,
    arm,
    kill_at,
    points,
    run_forked,
)

KEEP_TWO = Retention(keep_last=2)


@pytest.fixture
def before(quick_path: Path) -> Path:
    """Checkpoints of steps 1 and 2; saving step 3 with keep_last=2 deletes that of step 1."""
    store = CheckpointStore(quick_path / "before")
    save(store, 1)
    save(store, 2)
    return quick_path / "before"


def copied(before: Path, name: str) -> Path:
    target = before.parent / name
    shutil.copytree(before, target)
    return target


def in_background(store: CheckpointStore) -> None:
    """The same through the writer's thread."""
    with BackgroundWriter(store) as writer:
        version = store.next_version()
        writer.save(version, tensors_at(3), state_at(3))
        saved = finished(writer)
        assert saved.error is None
        writer.commit(version, saved.records, CheckpointInfo(step=3), KEEP_TWO)
        committed = finished(writer)
        assert committed.error is None


def check_after_crash(folder: Path) -> int:
    """A good checkpoint loads, `latest` is true, and the next save cleans up. The step that was loaded."""
    store = CheckpointStore(folder)
    damage: list[object] = []
    good = store.newest_good(damage.append)
    assert good is not None
    step = good.manifest.info.step
    assert step in (2, 3)
    assert_is(good, step)
    assert damage == []
    assert store.verify("latest") == []
    after = save(store, 4, retention=KEEP_TWO)
    assert after.version > good.version
    assert_is(store.newest_good(), 4)
    assert store.verify() == []
    assert len(store.manifests()) == 2
    kept = {f"v{manifest.version:08d}" for manifest in store.manifests()}
    assert {path.name for path in folder.iterdir()} <= {*kept, LATEST, ".lock"}
    return step


@pytest.mark.parametrize("how", ["by hand", "in the background"])
def test_every_call_of_a_save_with_pruning(before, how):
    def do(store: CheckpointStore) -> None:
        in_background(store) if how == "in the background" else save(store, 3, retention=KEEP_TWO)

    calls = CallRecorder()
    do(CheckpointStore(open_storage(copied(before, "counted"), call=calls)))
    names = {call.name for call in calls.made}
    assert {"mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir", "flock", "close"} <= names
    every = points(calls.made)
    assert len(every) > 2 * len(calls.made) > 100

    steps = []
    for point in every:
        folder = copied(before, "killed")
        code = run_forked(partial(do, CheckpointStore(kill_at(folder, point))))
        assert code == -signal.SIGKILL, point
        steps.append(check_after_crash(folder))
        shutil.rmtree(folder)
    # It turns from the old to the new one once, at the manifest's rename.
    turn = steps.index(3)
    assert steps == [2] * turn + [3] * (len(steps) - turn)
    assert every[turn].when == "after"
    assert "rename" in every[turn].what
    assert "manifest.json" in every[turn].what
    print(f"{len(calls.made)} calls, {len(every)} crash points, {turn} old and {len(steps) - turn} new")


def test_a_point_behind_the_last_call_does_no_harm(before):
    point = CrashPoint(10_000)
    assert run_forked(lambda: save(CheckpointStore(kill_at(before, point)), 3)) == 0
    assert_is(CheckpointStore(before).newest_good(), 3)


def test_a_process_can_be_armed_as_a_whole(before):
    def whole_run() -> None:
        arm(CrashPoint(10, "after"))
        save(CheckpointStore(before), 3)

    assert run_forked(whole_run) == -signal.SIGKILL
    assert_is(CheckpointStore(before).newest_good(), 2)


def test_in_the_middle_of_a_write_half_of_it_is_there(before):
    calls = CallRecorder()
    save(CheckpointStore(open_storage(copied(before, "counted"), call=calls)), 3)
    number = next(index for index, call in enumerate(calls.made, 1) if call.name == "write")
    run_forked(lambda: save(CheckpointStore(kill_at(before, CrashPoint(number, "middle"))), 3))
    (part,) = (before / "v00000003").iterdir()
    assert part.stat().st_size == len(calls.made[number - 1].arguments[1]) // 2


def test_an_error_in_the_child_is_not_taken_for_a_kill(capfd):
    assert run_forked(lambda: 1 / 0) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_points_name_their_call():
    every = points([RecordedCall("write", (3, b"abcd"), 4, False), RecordedCall("fsync", (3,), None, False)])
    assert [str(point) for point in every] == [
        "before call 1 (write(3, 4 bytes))",
        "middle call 1 (write(3, 4 bytes))",
        "after call 1 (write(3, 4 bytes))",
        "before call 2 (fsync(3))",
        "after call 2 (fsync(3))",
    ]
    assert str(CrashPoint(7)) == "before call 7"


def test_a_killer_passes_results_on():
    assert Killer(CrashPoint(5))(max, 3, 4) == 4
