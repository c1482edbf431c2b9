"""Disks that fill up while a run saves: training goes on, it is said, older checkpoints stay."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.train.small_run import STEPS, UNATTENDED, first, fit, journal_of, settings, steps_of
from torch import nn

from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.train.callbacks import Modifier
from paceline.train.settings.train_config import CheckpointConfig, FaultTolerance

ROOM = 640 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few hundred kilobytes, of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def build_wide() -> nn.Module:
    """With Adam's state, a checkpoint of some 250 KB: two fit on the disk."""
    return nn.Sequential(nn.Linear(6, 128), nn.ReLU(), nn.Linear(128, 148), nn.ReLU(), nn.Linear(148, 3))


def saves(folder: Path) -> tuple[list[events.CheckpointSaved], list[events.CheckpointFailed]]:
    found = journal_of(folder)
    return (
        [event for event in found if isinstance(event, events.CheckpointSaved)],
        [event for event in found if isinstance(event, events.CheckpointFailed)],
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_training_goes_on_and_older_checkpoints_stay(small_disk, tmp_path, capfd, workers):
    quiet = fit(settings(tmp_path / "quiet", 1), model=build_wide).state_hash
    folder = small_disk / "run"
    # More are to be kept than fit.
    checkpoint = CheckpointConfig(every_steps=4, every_epochs=None, keep_last=9)
    history = fit(settings(folder, workers, checkpoint=checkpoint), model=build_wide)
    assert history.state_hash == quiet
    assert history.stopped is None
    saved, failed = saves(folder)
    assert [event.step for event in saved] == [4, 8]
    assert [event.step for event in failed] == [*range(12, STEPS, 4), STEPS]
    assert all("No space left on device" in event.reason for event in failed)
    store = CheckpointStore(folder / "checkpoints")
    assert store.verify() == []
    assert [manifest.info.step for manifest in store.manifests()] == [4, 8]
    assert len(list((folder / "checkpoints").glob("v*"))) == 2
    told = capfd.readouterr().err
    assert told.count("could not be written, training continues; ") == len(failed)
    assert "checkpoint of step 12 could not be written" in (folder / "logs" / "rank-0.log").read_text()
    # With room again, the run can be taken up from the older one.
    assert steps_of(folder) == list(range(1, STEPS + 1))
    again = settings(folder, 2, checkpoint=CheckpointConfig(every_epochs=None, keep_last=1, keep_best=0))
    assert fit(dataclasses.replace(again, resume="auto"), model=build_wide).state_hash == quiet


class FillsTheDisk(Modifier):
    """Takes all room at one step and gives it back at another."""

    def __init__(self, folder: Path, full: int, free: int) -> None:
        self.file, self.full, self.free = folder / "filling", full, free

    def stop(self, record) -> None:
        if not first():
            return
        if record.step == self.full:
            with open(self.file, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    os.fsync(file.fileno())
        elif record.step == self.free:
            self.file.unlink()


@pytest.mark.parametrize("care", [FaultTolerance(), UNATTENDED], ids=["supervised", "unsupervised"])
def test_a_journal_that_has_no_room_is_completed_later(small_disk, tmp_path, capfd, care):
    quiet = fit(settings(tmp_path / "quiet", 1)).state_hash
    folder = small_disk / "run"
    # Enough events to fill the page of the file that the journal has already.
    config = settings(folder, 2, epochs=30, fault_tolerance=care)
    history = fit(config, [FillsTheDisk(small_disk, 9, 120)])
    assert steps_of(folder) == list(range(1, 151))
    told = capfd.readouterr().err
    # Once for every time that the room ran out, not for every event.
    assert 1 <= told.count("the journal is completed when that works again") < 10
    assert fit(settings(tmp_path / "long", 1, epochs=30)).state_hash == history.state_hash != quiet
