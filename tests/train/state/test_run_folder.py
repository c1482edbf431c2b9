"""A run's folder: names by time, never shared or overwritten, found again."""

from __future__ import annotations

import os
import threading

import pytest
from tests.virtual_clock import VirtualClock

from paceline.core import config as core_config
from paceline.core.errors import ConfigError, PlatformError, UsageError
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig
from paceline.train.state.run_folder import RunFolder, find_latest

PI_DAY = 1741964966.5  # 2025-03-14 15:09:26.5 UTC


def create(root, at=PI_DAY, **settings):
    return RunFolder.create(TrainConfig(**settings), root=root, clock=VirtualClock(at))


def test_a_new_run_gets_a_folder_with_everything_in_its_place(tmp_path):
    folder = create(tmp_path / "runs", workers=3)
    assert folder.path == tmp_path / "runs" / "20250314-150926-train"
    assert sorted(os.listdir(folder.path)) == ["checkpoints", "config.toml", "logs"]
    assert core_config.load(TrainConfig, folder.config_file) == TrainConfig(workers=3)
    assert folder.journal_file == folder.path / "journal.jsonl"
    assert RunFolder.open(folder.path) == folder


def test_runs_of_one_second_never_share_a_folder(tmp_path):
    made: list[RunFolder] = []
    threads = [threading.Thread(target=lambda: made.append(create(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = sorted(folder.path.name for folder in made)
    assert names == sorted(["20250314-150926-train", *(f"20250314-150926-train+{n}" for n in range(2, 9))])


def test_the_latest_is_by_time_then_by_copy_and_only_of_that_name(tmp_path):
    assert find_latest("train", root=tmp_path / "none") is None
    create(tmp_path, PI_DAY)
    create(tmp_path, PI_DAY + 7200, name="other")
    create(tmp_path, PI_DAY + 7200, name="train-2")
    for _ in range(11):
        newest = create(tmp_path, PI_DAY + 3600)
    assert newest.path.name.endswith("train+11")
    assert find_latest("train", root=tmp_path) == newest
    (tmp_path / "20990101-000000-train").mkdir()  # its creator died before it wrote the settings
    (tmp_path / "notes.txt").write_text("")
    assert find_latest("train", root=tmp_path) == newest
    assert find_latest("no-such-name", root=tmp_path) is None


def test_a_given_folder_is_made_once_and_never_overwritten(tmp_path):
    where = tmp_path / "a" / "b"
    folder = create(tmp_path, run_dir=str(where))
    assert folder.path == where
    with pytest.raises(UsageError, match="already holds a run") as raised:
        create(tmp_path, run_dir=str(where))
    assert 'resume="auto"' in raised.value.remedy
    (tmp_path / "journal-only").mkdir()
    (tmp_path / "journal-only" / "journal.jsonl").write_text("")
    with pytest.raises(UsageError, match="already holds a run"):
        create(tmp_path, run_dir=str(tmp_path / "journal-only"))


def test_a_run_without_its_settings_is_not_told_to_resume(tmp_path):
    """It was: by an error that answered resume="auto"."""
    where = tmp_path / "run"
    where.mkdir()
    (where / "journal.jsonl").write_text("")
    with pytest.raises(UsageError, match=r"its config\.toml is missing") as raised:
        RunFolder.for_config(TrainConfig(run_dir=str(where), resume="auto"))
    assert 'resume="auto"' not in raised.value.remedy


def test_a_folder_with_other_things_in_it_may_be_used(tmp_path):
    (tmp_path / "data.bin").write_bytes(b"x")
    assert create(tmp_path, run_dir=str(tmp_path)).config_file.is_file()
    assert (tmp_path / "data.bin").read_bytes() == b"x"


def test_resume_auto_takes_the_newest_or_begins(tmp_path):
    auto = TrainConfig(resume="auto")
    first = RunFolder.for_config(auto, root=tmp_path, clock=VirtualClock(PI_DAY))
    assert RunFolder.for_config(auto, root=tmp_path, clock=VirtualClock(PI_DAY + 60)) == first
    here = TrainConfig(resume="auto", run_dir=str(tmp_path / "here"))
    begun = RunFolder.for_config(here)
    assert begun.path == tmp_path / "here"
    assert RunFolder.for_config(here) == begun
    fresh = RunFolder.for_config(TrainConfig(), root=tmp_path, clock=VirtualClock(PI_DAY + 60))
    assert fresh != first


@pytest.mark.parametrize("resume", [12, "best"])
def test_a_version_or_a_tag_needs_a_run(tmp_path, resume):
    with pytest.raises(ConfigError, match=f"resume={resume!r}, and there is no run at"):
        RunFolder.for_config(TrainConfig(resume=resume), root=tmp_path)
    assert os.listdir(tmp_path) == []


def test_what_is_not_a_run_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"is not the folder of a run: it has no config\.toml"):
        RunFolder.open(tmp_path)
    with pytest.raises(UsageError, match="it does not exist"):
        RunFolder.open(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="cannot be written"):
        create(tmp_path, run_dir=str(tmp_path / "file" / "run"))


def test_checkpoints_are_in_the_folder_unless_told_otherwise(tmp_path):
    folder = create(tmp_path)
    assert folder.checkpoint_url(TrainConfig()) == str(folder.path / "checkpoints")
    elsewhere = TrainConfig(checkpoint=CheckpointConfig(url="memory://there"))
    assert folder.checkpoint_url(elsewhere) == "memory://there"


def test_a_relative_folder_stays_where_it_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(TrainConfig(run_dir="here"))
    monkeypatch.chdir("/")
    assert core_config.load(TrainConfig, folder.config_file).run_dir == "here"
    assert folder.path == tmp_path / "here"
