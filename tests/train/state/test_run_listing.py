"""Runs on disk: how each ended is told from its journal, and what may be deleted is decided without touching
it."""

from __future__ import annotations

import os

import pytest
from tests.virtual_clock import VirtualClock

from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.core.errors import UsageError
from paceline.core.journal import Journal
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state.run_folder import RunFolder
from paceline.train.state.run_listing import FoundRun, find_runs, look_at, remove_runs, runs_to_remove
from paceline.train.state.run_lock import held, is_held

STARTED = events.RunStarted(time=10.0, workers=1, shards=1, samples=8, definition={}, fingerprint={})
STEP = events.StepCommitted(time=20.0, step=7, epoch=1, loss=0.5, samples=4)
VIEW = events.ViewChanged(
    time=25.0, generation=2, reason="", members=[0], shards=[[0]], pids=[1], hosts=["h"], step=7
)
LOST = events.WorkerFailed(time=24.0, rank=0, pid=1, phase="step", reason="killed by signal 9")


def ended(reason, step=9):
    return events.RunEnded(time=30.0, step=step, epoch=2, reason=reason, hash="")


@pytest.fixture
def made(tmp_path):
    def make(name, *journal, at=0.0):
        folder = RunFolder.create(TrainConfig(run_dir=tmp_path / name), root=tmp_path, clock=VirtualClock(at))
        if journal:
            with Journal(folder.journal_file) as written:
                for event in journal:
                    written.append(event)
        return folder

    return make


@pytest.mark.parametrize(
    ("journal", "phase", "reason", "step"),
    [
        ((), "not begun", "", 0),
        ((STARTED,), "interrupted", "", 0),
        ((STARTED, STEP), "interrupted", "", 7),
        ((STARTED, STEP, ended("finished")), "finished", "", 9),
        ((STARTED, STEP, ended("SIGTERM", 8)), "stopped", "SIGTERM", 8),
        ((STARTED, STEP, LOST, VIEW), "interrupted", "", 7),
        ((STARTED, STEP, LOST), "failed", "killed by signal 9", 7),
        ((STARTED, LOST, events.RunFailed(time=31.0, step=7, reason="boom")), "failed", "boom", 0),
        (
            (STARTED, ended("finished"), events.RunResumed(time=40.0, version=2, step=9, epoch=2, workers=1)),
            "interrupted",
            "",
            9,
        ),
    ],
)
def test_the_journal_tells_how_a_run_ended(made, journal, phase, reason, step):
    run = look_at(made("a", *journal).path)
    assert (run.phase, run.reason, run.step) == (phase, reason, step)
    assert run.changed == (journal[-1].time if journal else run.started)


def test_runs_are_found_below_a_folder_oldest_first_with_their_size(made, tmp_path):
    made("second", events.Note(time=50.0, text="later"))
    first = made("first", STARTED, STEP)
    (first.logs / "rank-0.log").write_bytes(b"x" * 1000)
    (tmp_path / "notes").mkdir()
    (tmp_path / "linked").symlink_to(first.path)
    runs = find_runs(tmp_path)
    assert [run.path.name for run in runs] == ["first", "second"]
    sizes = [first.config_file, first.journal_file, first.logs / "rank-0.log"]
    assert runs[0].bytes == sum(file.stat().st_size for file in sizes)
    assert find_runs(first.path) == runs[:1]
    with pytest.raises(UsageError, match="there is no folder"):
        find_runs(tmp_path / "none")


def test_a_run_that_holds_its_lock_is_running_and_is_not_deleted(made):
    folder = made("a", STARTED, STEP, ended("finished"))
    run = look_at(folder.path)
    with held(folder.lock_file, "a"):
        assert is_held(folder.lock_file)
        assert look_at(folder.path).phase == "running"
        [(_, error)] = remove_runs([run])
        assert isinstance(error, UsageError)
        assert "is in use" in error.message
    assert not is_held(folder.lock_file)
    assert remove_runs([run]) == [(run, None)]
    assert not folder.path.exists()


def test_deleting_follows_no_link_and_touches_no_other_folder(made, tmp_path):
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "chapter").write_text("words")
    folder = made("a", STARTED)
    (folder.checkpoints / "v00000001").symlink_to(thesis)
    linked = tmp_path / "linked"
    linked.symlink_to(folder.path)
    run = look_at(folder.path)
    results = remove_runs([FoundRun(path=linked, phase="stopped"), FoundRun(path=thesis, phase="stopped")])
    assert ["is not the folder of a run" in str(error) for _, error in results] == [True, True]
    assert remove_runs([run]) == [(run, None)]
    assert (thesis / "chapter").read_text() == "words"


def test_tagged_versions_protect_their_run(made):
    folder = made("a", STARTED)
    store = CheckpointStore(folder.checkpoints)
    store.storage.put("tags.json", b"damaged")
    assert look_at(folder.path).tags == ("?",)
    os.remove(folder.checkpoints / "tags.json")
    assert runs_to_remove([look_at(folder.path)], now=1e10)
    tagged = FoundRun(path=folder.path, phase="finished", tags=("paper",))
    assert runs_to_remove([tagged], now=1e10) == []


def test_which_runs_go_is_decided_by_age_phase_and_number(tmp_path):
    def run(name, changed, phase="finished"):
        return FoundRun(path=tmp_path / name, phase=phase, changed=changed)

    runs = [run("a", 1.0), run("b", 2.0, "failed"), run("c", 3.0, "running"), run("d", 4.0)]

    def names(**rules):
        return [one.path.name for one in runs_to_remove(runs, now=10.0, **rules)]

    assert names() == ["a", "b", "d"]
    assert names(keep_last=1) == ["a", "b"]
    assert names(keep_last=3) == ["a"]
    assert names(older_than=7.0) == ["a", "b"]
    assert names(older_than=8.0) == ["a", "b"]
    assert names(older_than=8.5) == ["a"]
    assert names(phases=["failed"]) == ["b"]
