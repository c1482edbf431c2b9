"""The ends of saving: metrics that are not given, a last save that fails, a storage that does not answer."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch
from tests.train import small_run
from tests.train.small_run import STEPS_OF_EPOCH, UNATTENDED, fit, journal_of, settings
from tests.waiting import wait_for

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.core import events
from paceline.core.errors import CommTimeoutError, ConfigError, PlatformError, UsageError
from paceline.core.storage.local_storage import LocalStorage
from paceline.data.batch_plan import DataPosition
from paceline.train.settings.train_config import CheckpointConfig, EarlyStopping
from paceline.train.state.checkpointing import Checkpointer, RunContents
from paceline.train.team import Team


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (
            {"checkpoint": CheckpointConfig(metric="acuracy")},
            {"checkpoint": CheckpointConfig(metric="accuracy", mode="max")},
        ),
        (
            # A gain that only the first evaluation can be: its weights are those that come back.
            {"early_stopping": EarlyStopping(metric="acuracy")},
            {"early_stopping": EarlyStopping(metric="loss", min_delta=1e9, patience=2)},
        ),
    ],
)
def test_a_metric_that_no_evaluation_gives_costs_one_evaluation_and_no_step(tmp_path, wrong, right):
    folder = tmp_path / "run"
    whole = fit(settings(tmp_path / "whole", 1, epochs=3, **right))
    with pytest.raises(UsageError, match="'acuracy'") as caught:
        fit(settings(folder, 2, epochs=3, **wrong))
    assert any(f"of step {STEPS_OF_EPOCH} is saved" in note for note in caught.value.__notes__)
    again = fit(settings(folder, 2, epochs=3, resume="auto", **right))
    assert (again.state_hash, again.restored) == (whole.state_hash, whole.restored)
    assert [(one.step, one.metrics) for one in again.evaluations] == [
        (one.step, one.metrics) for one in whole.evaluations
    ]


def test_versions_can_be_kept_by_the_loss_of_training(tmp_path):
    keeping = CheckpointConfig(metric="train_loss", keep_last=1, every_epochs=1)
    history = fit(settings(tmp_path / "run", 1, checkpoint=keeping))
    saved = CheckpointStore(str(tmp_path / "run" / "checkpoints")).manifests()
    ends = history.steps[STEPS_OF_EPOCH - 1 :: STEPS_OF_EPOCH]
    assert min(one.info.metrics["train_loss"] for one in saved) == min(record.loss for record in ends)
    assert all("loss" in one.info.metrics for one in saved)


def test_a_metric_that_no_evaluation_gives_is_refused(tmp_path):
    for number, keep_best in enumerate((2, 0)):
        checkpoint = CheckpointConfig(metric="acuracy", mode="max", keep_best=keep_best)
        config = settings(tmp_path / str(number), 1, epochs=1, checkpoint=checkpoint)
        if keep_best:
            with pytest.raises(ConfigError, match=r"'acuracy'.* evaluations give accuracy, loss"):
                fit(config)
        else:
            fit(config)


class BreaksThenStops(small_run.Signals):
    """A file takes the place of the folder of checkpoints, and then the run is asked to stop."""

    def send(self) -> None:
        shutil.rmtree(self.folder / "checkpoints")
        (self.folder / "checkpoints").write_text("in the way")
        super().send()


@pytest.mark.parametrize(
    ("workers", "care"), [(1, paceline.FaultTolerance()), (2, paceline.FaultTolerance()), (2, UNATTENDED)]
)
def test_a_stop_whose_save_fails_does_not_claim_to_be_saved(tmp_path, workers, care, capfd):
    folder = tmp_path / "run"
    config = settings(folder, workers, checkpoint=CheckpointConfig(every_steps=None), fault_tolerance=care)
    with pytest.raises(PlatformError, match=r"stopped after step 4 \(SIGTERM\), and this state could not be"):
        fit(config, [BreaksThenStops(folder, 3, ["main"])])
    kinds = [type(event) for event in journal_of(folder)]
    assert events.CheckpointFailed in kinds
    assert events.RunEnded in kinds
    assert "could not be written" in capfd.readouterr().err


def test_what_was_written_from_memory_that_changed_since_it_was_compared_is_not_committed(tmp_path):
    told: list[events.Event] = []
    with DistributedContext(1, 0) as context:
        saver = Checkpointer(
            CheckpointConfig(),
            CheckpointStore(str(tmp_path)),
            Team(context, 1),
            run="run",
            patience=5.0,
            tell=told.append,
            on_saved=lambda saved: None,
        )
        weights = torch.ones(3)
        contents = RunContents({"model/w": weights}, {}, {})
        agreed = saver.digests(contents)
        weights.view(torch.int32)[1] ^= 1
        saver.begin(DataPosition(step=1), contents, {}, agreed)
        saver.drain()
        (failed,) = told
        assert isinstance(failed, events.CheckpointFailed)
        assert "rank 0: what it wrote is not what all ranks hold" in failed.reason
        assert CheckpointStore(str(tmp_path)).manifests() == []
        saver.begin(DataPosition(step=2), contents, {}, saver.digests(contents))
        saver.drain()
        assert [one.info.step for one in CheckpointStore(str(tmp_path)).manifests()] == [2]
        saver.close()


def test_a_storage_that_does_not_answer_is_not_waited_for_for_ever(tmp_path):
    gate = threading.Event()

    def held_up(operation, /, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            gate.wait(60)
        return operation(*args, **kwargs)

    with DistributedContext(1, 0) as context:
        saver = Checkpointer(
            CheckpointConfig(),
            CheckpointStore(LocalStorage(str(tmp_path), call=held_up)),
            Team(context, 1),
            run="run",
            patience=0.05,
            tell=lambda event: None,
            on_saved=lambda saved: None,
        )
        saver.begin(DataPosition(step=1), RunContents({"model/w": torch.ones(3)}, {}, {}), {})
        with pytest.raises(CommTimeoutError, match="has been writing a checkpoint"):
            saver.drain()
        saver.close()
        gate.set()
        wait_for(lambda: all(not t.name.startswith("paceline-checkpoint") for t in threading.enumerate()))


def test_stopped_means_saved(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(paceline.Stopped):
        fit(settings(folder, 1), [small_run.Signals(folder, 3, ["main"])])
    assert CheckpointStore(folder / "checkpoints").open().manifest.info.step == 4


def test_going_back_forgets_a_save_that_the_group_broke_off(tmp_path):
    """A member that joins after it knows nothing of that save: all must begin the same saves."""
    with DistributedContext(1, 0) as context:
        saver = Checkpointer(
            CheckpointConfig(every_steps=15, every_epochs=None),
            CheckpointStore(str(tmp_path)),
            Team(context, 1),
            run="run",
            patience=5.0,
            tell=lambda event: None,
            on_saved=lambda saved: None,
        )
        saver.begin(DataPosition(step=75), RunContents({"model/w": torch.ones(3)}, {}, {}), {})
        saver.rebind()
        assert saver.due_after_step(76), "it is saved again where the run goes on"
        saver.begin_from(4, 60, "run")
        assert not saver.due_after_step(61)
        saver.close()
