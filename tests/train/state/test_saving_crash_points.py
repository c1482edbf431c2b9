"""A whole training run whose writer is killed at every file-system call of its saves, enumerated: each time
what is there loads, and the run that goes on from it ends with the right hash. Prints how many points."""

from __future__ import annotations

import contextlib
import functools
import gc
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.folder_in_memory import folder_in_memory
from tests.train.small_run import UNATTENDED, build, fit, journal_of, settings, steps_of
from torch import nn

import paceline
from paceline.checkpoint.manifest import CheckpointDamage
from paceline.checkpoint.store import CheckpointStore
from paceline.core import atomic_file
from paceline.core.errors import PeerLostError
from paceline.core.events import WorkerFailed
from paceline.core.storage.open_storage import open_storage
from paceline.testing.storage_crash_points import CallRecorder, CrashPoint, arm, points, run_forked
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

STEPS = 4
EVERY = 2


def config(folder: Path, **changes: object) -> TrainConfig:
    return settings(
        folder,
        1,
        shards=1,
        epochs=None,
        max_steps=STEPS,
        checkpoint=CheckpointConfig(every_steps=EVERY, every_epochs=None, keep_last=1, keep_best=0),
        **changes,
    )


def train(settled: TrainConfig) -> str:
    """In this process, with dropout and momentum, so that a wrong state shows in the weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.3), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(54, 6, generator=generator), torch.randint(0, 3, (54,), generator=generator)
    with paceline.session(model, optimizer, settled) as run:
        for micro in run.microbatches(data):
            run.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
    assert run.history is not None
    return run.history.state_hash


def refuse(damage: CheckpointDamage) -> None:
    pytest.fail(str(damage))


def die(folder: Path, point: CrashPoint) -> None:
    arm(point)
    train(config(folder))


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder where making things durable costs nothing, with a collected heap that forks do not copy."""
    with folder_in_memory() as folder:
        gc.collect()
        gc.freeze()
        yield folder
        gc.unfreeze()


def test_the_writer_is_killed_at_every_call_of_a_run(in_memory, monkeypatch, capfd):
    quiet = train(config(in_memory / "quiet"))
    calls = CallRecorder()
    with monkeypatch.context() as patch:
        patch.setattr(atomic_file, "direct", calls)
        assert train(config(in_memory / "counted")) == quiet
    every = points(calls.made)
    assert {"mkdir", "write", "fsync", "rename", "unlink", "rmdir"} <= {call.name for call in calls.made}
    begun_at = []
    for point in every:
        folder = in_memory / "killed"
        code = run_forked(functools.partial(die, folder, point))
        assert code == -signal.SIGKILL, (point, capfd.readouterr().err)
        good = CheckpointStore(folder / "checkpoints").newest_good(refuse)
        begun_at.append(0 if good is None else good.manifest.info.step)
        assert train(config(folder, resume="auto")) == quiet, point
        assert CheckpointStore(folder / "checkpoints").verify() == [], point
        shutil.rmtree(folder)
    # Versions only ever become newer; each save has its turn.
    assert begun_at == sorted(begun_at)
    assert set(begun_at) == {0, 2, 4}
    with capfd.disabled():
        print(f"\n{len(every)} crash points in {len(calls.made)} calls of {STEPS // EVERY} saves: ", end="")
        print(", ".join(f"{begun_at.count(step)} went on from step {step}" for step in (0, 2, 4)))


class ArmedModel:
    """A function that builds the model; in the process of the first rank it also sets the crash point."""

    def __init__(self, point: CrashPoint) -> None:
        self.point = point

    def __call__(self) -> nn.Module:
        if paceline.is_initialized() and paceline.get_rank() == 0:
            arm(self.point)
        return build()


@pytest.mark.parametrize("call", [9, 25, 40, 55])
def test_with_several_workers_the_death_of_the_writer_ends_the_job(tmp_path, call):
    quiet = fit(settings(tmp_path / "quiet", 1, epochs=2)).state_hash
    folder = tmp_path / "run"
    point = CrashPoint(call, "after")
    with pytest.raises(PeerLostError, match=r"rank 0 .* was killed by signal 9"):
        fit(settings(folder, 3, epochs=2, fault_tolerance=UNATTENDED), model=ArmedModel(point))
    assert steps_of(folder)
    history = fit(settings(folder, 2, epochs=2, resume="auto"))
    assert history.state_hash == quiet
    assert open_storage(folder / "checkpoints").names("")


class ArmedOnce:
    """A function that builds the model; the first process that does also sets the crash point."""

    def __init__(self, point: CrashPoint, mark: Path) -> None:
        self.point, self.mark = point, mark

    def __call__(self) -> nn.Module:
        with contextlib.suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            arm(self.point)
        return build()


@pytest.mark.parametrize("call", [3, 9, 14])
def test_with_a_supervisor_the_death_of_the_writer_leaves_no_trace(tmp_path, call):
    quiet = fit(settings(tmp_path / "quiet", 1, epochs=2)).state_hash
    folder = tmp_path / "run"
    armed = ArmedOnce(CrashPoint(call, "after"), tmp_path / "armed")
    history = fit(settings(folder, 3, epochs=2), model=armed)
    assert history.state_hash == quiet
    (failed,) = [event for event in journal_of(folder) if isinstance(event, WorkerFailed)]
    assert "signal 9" in failed.reason
    store = CheckpointStore(folder / "checkpoints")
    assert store.verify() == []
    assert store.open().manifest.info.step == steps_of(folder)[-1]
