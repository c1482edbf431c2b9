"""The record of a loop that is not Paceline's: journal, verified versions, trackers, verdicts, history."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.core import events, journal
from paceline.core.errors import UsageError
from paceline.data.batch_plan import DataPosition
from paceline.frontends.framework_trainers.framework_run import FrameworkRun, FrameworkWorker, WorkerLoss
from paceline.train.state.weight_averages import EMA

TWO = (FrameworkWorker(0, 100, "here"), FrameworkWorker(1, 101, "there"))
LOSS = WorkerLoss(phase="a step", reason="was lost", waiting="the others waited", action="they go on")


def config(folder: Path, **more: Any) -> paceline.TrainConfig:
    chosen: dict[str, Any] = {
        "run_dir": str(folder),
        "workers": 2,
        "mode": "fast",
        "epochs": 3,
        "checkpoint": paceline.CheckpointConfig(every_epochs=1),
        **more,
    }
    return paceline.TrainConfig(**chosen)


class Loop:
    """A loop that adds 1 to its only weight in each of the two steps of an epoch."""

    def __init__(self, run: FrameworkRun) -> None:
        self.run, self.weight = run, torch.zeros(1)
        if run.resumed is not None:
            self.weight.copy_(run.resumed.tensors()["model/weight"])
            assert run.resumed.state["own"] == "kept"

    def start(self, workers: Sequence[FrameworkWorker] = TWO, **more: Any) -> None:
        self.run.start(workers, lambda: ({"model/weight": self.weight}, {"own": "kept"}), samples=8, **more)

    def step(self) -> None:
        self.weight += 1
        self.run.step(loss=1.0 / float(self.weight), samples=4, learning_rate=0.5, metrics={"norm": 2.0})

    def train(self, epochs: int = 3) -> paceline.History:
        while self.run.position.epoch < epochs:
            while self.run.position.offset < 8:
                self.step()
            self.run.evaluated({"loss": 0.25, "accuracy": 0.5}, 8, 0.1)
            self.run.end_epoch()
        return self.run.finish("the hash")


def found(folder: Path, kind: type[Any]) -> list[Any]:
    return [event for event in journal.iterate(folder / "journal.jsonl") if isinstance(event, kind)]


def test_a_run_is_recorded_and_its_versions_verify(tmp_path: Path) -> None:
    rows = paceline.CsvLog(every=1)
    with FrameworkRun.open(config(tmp_path / "run"), "other 1.0", [rows]) as run:
        loop = Loop(run)
        loop.start()
        history = loop.train()
    assert [record.step for record in history.steps] == [1, 2, 3, 4, 5, 6]
    assert [record.epoch for record in history.steps] == [0, 0, 1, 1, 2, 2]
    assert history.steps[0].metrics == {"norm": 2.0}
    assert history.epochs[2].loss == pytest.approx((1 / 5 + 1 / 6) / 2)
    assert history.epochs[0].validation == {"loss": 0.25, "accuracy": 0.5}
    assert (history.best_accuracy, history.workers, history.state_hash) == (0.5, 2, "the hash")
    assert (history.stopped, history.unfinished) == (None, None)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.verify() == []
    assert [one.info.step for one in store.manifests()] == [2, 4, 6]
    assert store.open().state["position"] == {"epoch": 3, "offset": 0, "step": 6, "samples": 24}
    assert [one.rank for one in found(tmp_path / "run", events.WorkerStarted)] == [0, 1]
    assert found(tmp_path / "run", events.RunStarted)[0].definition["framework"] == "other 1.0"
    written = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert any(line.split(",")[1] == "6" for line in written), written


def test_a_run_that_failed_goes_on_from_the_newest_version_that_verifies(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = FrameworkRun.open(config(folder), "other 1.0")
    loop = Loop(run)
    loop.start()
    for _ in range(2):
        loop.step()
        loop.step()
        run.end_epoch()
    loop.step()
    run.close(RuntimeError("a broken link"))
    assert found(folder, events.RunFailed)[0].reason == "RuntimeError: a broken link"
    newest = folder / "checkpoints" / "v00000002" / "part-00-of-01.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    with FrameworkRun.open(config(folder, resume="auto"), "other 1.0") as run:
        assert run.resumed is not None
        assert (run.resumed.version, run.position.step) == (1, 2)
        loop = Loop(run)
        loop.start()
        history = loop.train()
    assert float(loop.weight) == 6.0
    assert [record.step for record in history.steps] == [1, 2, 3, 4, 5, 6]
    assert [record.epoch for record in history.epochs] == [0, 1, 2]
    assert [record.steps for record in history.epochs] == [2, 2, 2]
    assert found(folder, events.RunResumed)[0].version == 1


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    every = config(tmp_path / "run", checkpoint=paceline.CheckpointConfig(every_steps=1))
    run = FrameworkRun.open(every, "other 1.0")
    loop = Loop(run)
    loop.start()
    for _ in range(3):
        loop.step()
        if loop.run.position.offset == 8:
            run.end_epoch()
    run.close()
    resumed = paceline.TrainConfig(**{**vars(every), "resume": "auto"})
    with FrameworkRun.open(resumed, "other 1.0") as run:
        assert run.position == DataPosition(epoch=1, offset=4, step=3, samples=12)
        loop = Loop(run)
        loop.start()
        history = loop.train()
    # The epoch's mean is over all of its steps, also over that of the earlier start.
    assert history.epochs[1].samples == 8
    assert history.epochs[1].loss == pytest.approx((1 / 3 + 1 / 4) / 2)


def test_a_lost_worker_has_a_verdict_and_the_steps_after_the_position_are_done_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with FrameworkRun.open(config(folder), "other 1.0") as run:
        loop = Loop(run)
        loop.start()
        loop.step()
        kept = run.position
        loop.step()
        run.lost(TWO[1:], LOSS)
        run.regroup(kept, TWO[:1])
        loop.weight -= 1
        history = loop.train()
    verdict = found(folder, events.Verdict)[0]
    assert (verdict.rank, verdict.pid, verdict.host) == (1, 101, "there")
    assert verdict.text == (
        "rank 1 (process 101 on there) was lost in a step, step 3; the others waited; they go on"
    )
    assert found(folder, events.Repaired)[0].lost == [1]
    assert [record.step for record in history.steps] == [1, 2, 3, 4, 5, 6]
    assert history.epochs[0].steps == 2
    assert history.workers == 1


def test_another_process_takes_the_record_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = FrameworkRun.open(config(folder), "other 1.0")
    loop = Loop(first)
    loop.start()
    loop.step()
    kept = first.position
    with pytest.raises(UsageError, match="is in use"):
        FrameworkRun.take_over(str(folder), config(folder), "other 1.0", (), kept)
    first.abandon()
    with FrameworkRun.take_over(str(folder), config(folder), "other 1.0", (), kept) as second:
        second.lost(TWO[:1], LOSS)
        after = Loop(second)
        after.weight.fill_(1)
        after.start(TWO[1:], continued=True)
        history = after.train()
    assert [record.step for record in history.steps] == [1, 2, 3, 4, 5, 6]
    assert len(found(folder, events.RunStarted)) == 1
    assert history.epochs[0].steps == 2


@pytest.mark.parametrize(
    ("framework", "said"),
    [("another 2.0", "was written by other 1.0, and this trainer runs on another 2.0"), ("other 1.1", "")],
)
def test_a_version_of_another_framework_is_refused(tmp_path: Path, framework: str, said: str) -> None:
    with FrameworkRun.open(config(tmp_path / "run"), "other 1.0") as run:
        loop = Loop(run)
        loop.start()
        loop.train()
    again = config(tmp_path / "run", resume="auto")
    if said:
        with pytest.raises(UsageError, match=said):
            FrameworkRun.open(again, framework)
    else:
        FrameworkRun.open(again, framework).close()


def test_a_folder_that_holds_a_run_and_modifiers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="EMA changes training, and the loop is the framework's"):
        FrameworkRun.open(config(tmp_path / "run"), "other 1.0", [EMA()])
    with FrameworkRun.open(config(tmp_path / "run"), "other 1.0") as run:
        loop = Loop(run)
        loop.start()
        loop.train()
    with pytest.raises(UsageError, match="already holds a run"):
        FrameworkRun.open(config(tmp_path / "run"), "other 1.0")


def test_without_checkpoints_nothing_is_saved(tmp_path: Path) -> None:
    off = paceline.CheckpointConfig(enabled=False)
    with FrameworkRun.open(config(tmp_path / "run", checkpoint=off), "other 1.0") as run:
        loop = Loop(run)
        loop.start()
        assert len(loop.train().steps) == 6
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
