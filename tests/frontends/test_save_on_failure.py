"""A run that ends because of the user's code: the last committed step is saved, and one message says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.small_run import STEPS, adam, build, data, journal_of, settings, steps_of
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.core.errors import RankFailedError, UsageError
from paceline.train.callbacks import Observer
from paceline.train.history import History, StepRecord
from paceline.train.settings.train_config import CheckpointConfig, GradientCompression

BAD = 17  # some sample


class Pictures(Dataset[Any]):
    """The small run's samples; one of them cannot be read while the file `broken` is there."""

    def __init__(self, broken: Path) -> None:
        self.x, self.y = data()
        self.broken = broken

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == BAD and self.broken.exists():
            raise ValueError(f"picture {index} cannot be decoded")
        return self.x[index], self.y[index]


def loss_unless(broken: Path) -> Any:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if broken.exists():
            raise ZeroDivisionError("the loss is no good")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return loss


def fit(config: paceline.TrainConfig, dataset: Any, objective: Any = None, callbacks: Any = ()) -> History:
    made = paceline.Trainer(
        build, objective or nn.CrossEntropyLoss(), optimizer=adam, config=config, callbacks=callbacks
    )
    return made.fit(dataset)


def rare(**changes: Any) -> CheckpointConfig:
    """No version before the run ends."""
    return CheckpointConfig(every_steps=None, every_epochs=None, **changes)


def saved_steps(folder: Path) -> list[int]:
    return [manifest.info.step for manifest in CheckpointStore(folder / "checkpoints").manifests()]


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("quiet")
    return fit(settings(folder / "run", 1), Pictures(folder / "never")).state_hash


@pytest.mark.parametrize(("workers", "care"), [(1, True), (2, True), (3, True), (1, False), (2, False)])
def test_a_sample_that_cannot_be_read(tmp_path, quiet, workers, care):
    folder, broken = tmp_path / "run", tmp_path / "broken"
    broken.touch()
    care = paceline.FaultTolerance(enabled=care)
    config = settings(folder, workers, checkpoint=rare(), fault_tolerance=care)
    with pytest.raises(UsageError, match=f"sample {BAD} of Pictures cannot be read") as caught:
        fit(config, Pictures(broken))
    at = max(steps_of(folder), default=0)
    assert saved_steps(folder) == ([at] if at else [])
    if at:
        assert f"of step {at} is saved" in notes(caught.value)
    broken.unlink()
    assert fit(settings(folder, 2, resume="auto"), Pictures(broken)).state_hash == quiet
    assert len(set(steps_of(folder))) == len(steps_of(folder))  # none was done twice


class BreaksAt(Observer):
    """From a step on every rank raises."""

    def __init__(self, step: int, broken: Path) -> None:
        self.step, self.broken = step, broken

    def on_step(self, record: StepRecord) -> None:
        if record.step == self.step:
            self.broken.touch()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_rank_raises_at_once(tmp_path, workers):
    folder, broken = tmp_path / "run", tmp_path / "broken"
    objective = loss_unless(broken)
    quiet = fit(settings(tmp_path / "quiet", 1), data(), objective).state_hash
    config = settings(folder, workers, checkpoint=rare(), epochs=2000)
    with pytest.raises(RankFailedError, match="ZeroDivisionError: the loss is no good") as caught:
        fit(config, data(), objective, [BreaksAt(6, broken)])
    at = max(steps_of(folder))
    assert saved_steps(folder)[-1] == at
    assert f"of step {at} is saved" in notes(caught.value)
    assert isinstance(journal_of(folder)[-1], events.RunFailed)
    assert not any(isinstance(event, events.RunEnded) for event in journal_of(folder))
    broken.unlink()
    if at < STEPS:
        assert fit(settings(folder, 2, resume="auto"), data(), objective).state_hash == quiet


def test_with_state_that_each_rank_has_for_itself(tmp_path):
    """Every rank has residuals of compression, so all of them have to be there when these are saved."""
    folder, broken = tmp_path / "run", tmp_path / "broken"
    objective, kind = loss_unless(broken), GradientCompression(kind="int8")
    config = settings(folder, 3, checkpoint=rare(), compression=kind, epochs=2000)
    with pytest.raises(UsageError, match="never be this large"):
        fit(config, data(), refusing(objective, broken), [BreaksAt(6, broken)])
    assert saved_steps(folder)[-1] == max(steps_of(folder))


def refusing(objective: Any, broken: Path) -> Any:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if broken.exists():
            # An error that is not tried again.
            raise UsageError("the loss must never be this large", remedy="make it smaller")
        made: Tensor = objective(model, batch)
        return made

    return loss


class Stumbles(Observer):
    def on_step(self, record: StepRecord) -> None:
        if record.step == 7:
            raise KeyError("no such figure")


def test_an_observer_that_raises_in_the_calling_process(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(UsageError, match="the observer Stumbles raised KeyError") as caught:
        fit(settings(folder, 2, checkpoint=rare(), epochs=2000), data(), callbacks=[Stumbles()])
    assert saved_steps(folder)[-1] == max(steps_of(folder)) >= 7
    assert "is saved" in notes(caught.value)


def test_without_checkpoints_nothing_is_written(tmp_path):
    folder, broken = tmp_path / "run", tmp_path / "broken"
    broken.touch()
    with pytest.raises(UsageError) as caught:
        fit(settings(folder, 2, checkpoint=CheckpointConfig(enabled=False)), Pictures(broken))
    assert list((folder / "checkpoints").iterdir()) == []
    assert "nothing is saved, because checkpoints are turned off" in notes(caught.value)


def own_loop(model: nn.Module, config: paceline.TrainConfig) -> None:
    with paceline.session(model, torch.optim.Adam(model.parameters(), 1e-2), config) as run:
        for micro in run.microbatches(data()):
            if micro.step == 8:
                raise ZeroDivisionError
            run.backward(nn.functional.cross_entropy(model(micro.x), micro.y))


def test_a_loop_of_the_users_own(tmp_path):
    folder = tmp_path / "run"
    torch.manual_seed(0)
    model = build()
    config = settings(folder, 1, checkpoint=rare())
    with pytest.raises(ZeroDivisionError) as caught:
        own_loop(model, config)
    assert saved_steps(folder) == [8]
    assert "of step 8 is saved" in notes(caught.value)


PROGRAM = """
import sys
import torch
import paceline
from torch.utils.data import Dataset

class Pictures(Dataset):
    def __len__(self):
        return 640
    def __getitem__(self, index):
        if index == 333:
            raise ValueError(f"picture {index} cannot be decoded")
        return torch.ones(8) * index / 640, torch.ones(1)

if __name__ == "__main__":
    config = paceline.TrainConfig(workers=3, shards=4, global_batch=32, epochs=3, run_dir=sys.argv[1])
    sgd = lambda parameters: torch.optim.SGD(parameters, 0.01)
    trainer = paceline.Trainer(torch.nn.Linear(8, 1), torch.nn.MSELoss(), optimizer=sgd, config=config)
    trainer.fit(Pictures())
"""


@pytest.mark.parametrize("how", ["python", "paceline train"])
def test_one_mistake_is_one_message(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    start = [sys.executable] if how == "python" else [sys.executable, "-m", "paceline", "train"]
    done = subprocess.run(
        [*start, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (1, 2)
    said = done.stdout + done.stderr
    assert len(said.splitlines()) <= 25, said
    # The line of the user's own code, once, and nothing of ours below it.
    assert said.count("in __getitem__") == 1
    assert "paceline/train/" not in said
    assert f"of step {max(steps_of(tmp_path / 'run'))} is saved" in said
    assert said.count("Traceback (most recent call last)") <= 1
