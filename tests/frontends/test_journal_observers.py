"""What observers of a supervised run are told, from its journal."""

from __future__ import annotations

from pathlib import Path

from paceline.core import events
from paceline.core.journal import Journal
from paceline.frontends.supervised_run import JournalObservers
from paceline.train.callbacks import Callbacks, Observer, RunInfo
from paceline.train.settings.train_config import TrainConfig


class Counts(Observer):
    def __init__(self) -> None:
        self.told: list[int] = []

    def on_start(self, run: RunInfo) -> None:
        self.told.append(run.workers)

    def on_workers(self, workers: int) -> None:
        self.told.append(workers)


def view(generation: int, members: int) -> events.ViewChanged:
    return events.ViewChanged(
        time=0.0,
        generation=generation,
        reason="scaled",
        members=list(range(members)),
        shards=[[]] * members,
        pids=[1] * members,
        hosts=["h"] * members,
        step=0,
    )


def test_another_number_of_workers_is_told(tmp_path: Path) -> None:
    counts = Counts()
    info = RunInfo(config=TrainConfig(workers=2), workers=2)
    following = JournalObservers(tmp_path / "journal.jsonl", Callbacks([counts]), info, "")
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append(view(1, 2))
        journal.append(
            events.RunStarted(time=0.0, workers=2, shards=4, samples=1, definition={}, fingerprint={})
        )
        for generation, members in ((2, 1), (3, 1), (4, 3)):
            journal.append(view(generation, members))
    following.read()
    assert counts.told == [2, 1, 3]
