"""One bit of one worker's memory flips: the run ends with the right bits, or with an error that names the
rank and leaves nothing behind that a resume would take for good."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest
import torch
from tests.frontends.flipped_bits import Flips, build_large, flip, of, supervised
from tests.train import small_run
from tests.train.small_run import fit, settings
from tests.waiting import wait_for
from torch import nn
from typer.testing import CliRunner

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.cli.main import app
from paceline.core import events
from paceline.frontends.recomputation import verify_fit
from paceline.train.callbacks import Modifier
from paceline.train.settings.train_config import CheckpointConfig


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    return fit(settings(folder, 1, fault_tolerance=paceline.FaultTolerance(enabled=False)))


def audited(folder: Path) -> str:
    done = CliRunner().invoke(app, ["audit", str(folder)])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("audit_every", [0, 5])
@pytest.mark.parametrize(("workers", "rank"), [(3, 0), (3, 2), (2, 0), (2, 1)])
def test_a_flipped_bit_leaves_no_trace_and_its_rank_is_named(
    workers, rank, audit_every, tmp_path, undisturbed
):
    folder = tmp_path / "run"
    history = fit(supervised(folder, workers, audit_every=audit_every), [Flips(tmp_path / "mark", 13, rank)])
    assert (tmp_path / "mark").exists()
    assert history.state_hash == undisturbed.state_hash
    blamed = [(event.rank, event.cause) for event in of(events.WorkerFailed, folder)]
    assert blamed == [(rank, "dissent")]
    assert [event.rank for event in of(events.Verdict, folder)] == [rank]
    audited(folder)


@pytest.mark.parametrize(("workers", "rank", "killed"), [(3, 0, 1), (3, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_a_flipped_bit_and_then_a_kill_and_a_join(workers, rank, killed, tmp_path, undisturbed):
    """The state of the odd worker is handed to none."""
    folder = tmp_path / "run"
    chaos = f"kill rank={killed} step=15 phase=backward"
    history = fit(supervised(folder, workers, chaos), [Flips(tmp_path / "mark", 13, rank)])
    assert history.state_hash == undisturbed.state_hash
    assert rank in [event.rank for event in of(events.WorkerFailed, folder) if event.cause == "dissent"]
    audited(folder)


@pytest.mark.parametrize(("workers", "rank"), [(3, 0), (3, 2), (2, 0)])
@pytest.mark.parametrize("step", [16, 30])
def test_a_bit_that_flips_after_the_last_exchange_before_a_save_or_the_end(
    workers, rank, step, tmp_path, undisturbed
):
    folder = tmp_path / "run"
    history = fit(supervised(folder, workers), [Flips(tmp_path / "mark", step, rank)])
    assert history.state_hash == undisturbed.state_hash
    assert [event.rank for event in of(events.WorkerFailed, folder)] == [rank]
    audited(folder)


@pytest.mark.parametrize("rank", [0, 2])
def test_without_a_supervisor_the_run_ends_with_an_error_and_a_resume_is_right(rank, tmp_path, undisturbed):
    folder = tmp_path / "run"
    alone = settings(folder, 3, fault_tolerance=paceline.FaultTolerance(enabled=False))
    with pytest.raises(paceline.PacelineError, match=f"after step 13 rank {rank} has other weights"):
        fit(alone, [Flips(tmp_path / "mark", 13, rank)])
    steps = [manifest.info.step for manifest in CheckpointStore(folder / "checkpoints").manifests()]
    assert steps
    assert max(steps) <= 12
    again = small_run.settings(
        folder, 3, resume="auto", fault_tolerance=paceline.FaultTolerance(enabled=False)
    )
    history = fit(again, [Flips(tmp_path / "mark", 13, rank)])
    assert history.state_hash == undisturbed.state_hash


class FlippingAdam(torch.optim.Adam):
    """A bit of its second moments changes, once, in the worker of one rank."""

    mark: Path
    rank: int

    def step(self, closure=None):
        done = super().step(closure)
        parameter = self.param_groups[0]["params"][0]
        here = os.environ.get("RANK") == str(self.rank) and not self.mark.exists()
        if here and int(self.state[parameter]["step"]) == 10:
            self.mark.touch()
            flip(self.state[parameter]["exp_avg_sq"], 29)
        return done


@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (2, 1), (3, 0)])
def test_a_flipped_bit_of_the_optimizers_state(workers, rank, tmp_path, undisturbed):
    folder, mark = tmp_path / "run", tmp_path / "mark"

    def optimizer(parameters):
        made = FlippingAdam(parameters, 1e-2)
        made.mark, made.rank = mark, rank
        return made

    trainer = paceline.Trainer(
        small_run.build, nn.CrossEntropyLoss(), optimizer=optimizer, config=supervised(folder, workers)
    )
    history = trainer.fit(small_run.data(), small_run.data())
    assert mark.exists()
    assert history.state_hash == undisturbed.state_hash
    assert [(one.rank, one.cause) for one in of(events.WorkerFailed, folder)] == [(rank, "dissent")]
    audited(folder)


class FlipsABuffer(Modifier):
    """Once, in the worker of one rank: the running mean of a BatchNorm, on which no gradient depends."""

    def __init__(self, mark: Path, rank: int) -> None:
        self.mark, self.rank, self.seen = mark, rank, 0

    def change_gradients(self, parameters):
        self.seen += 1
        if self.seen == 10 and os.environ.get("RANK") == str(self.rank) and not self.mark.exists():
            self.mark.touch()
            norm = next(
                one
                for one in gc.get_objects()
                if isinstance(one, nn.BatchNorm1d) and one.weight is parameters["1.weight"]
            )
            assert norm.running_mean is not None
            flip(norm.running_mean, 29)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


@pytest.mark.parametrize(("workers", "rank"), [(2, 0), (2, 1), (3, 2)])
def test_a_flipped_bit_of_a_buffer_is_found_with_the_next_checkpoint(workers, rank, tmp_path, undisturbed):
    folder, mark = tmp_path / "run", tmp_path / "mark"
    history = fit(supervised(folder, workers), [FlipsABuffer(mark, rank)])
    assert mark.exists()
    assert history.state_hash == undisturbed.state_hash
    assert [(one.rank, one.cause) for one in of(events.WorkerFailed, folder)] == [(rank, "dissent")]
    audited(folder)


def test_without_checkpoints_all_begin_anew(tmp_path, undisturbed):
    folder = tmp_path / "run"
    config = supervised(folder, 2, checkpoint=CheckpointConfig(enabled=False))
    assert fit(config, [Flips(tmp_path / "mark", 13, 0)]).state_hash == undisturbed.state_hash
    audited(folder)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "run"
    config = settings(folder, 1, epochs=3, fault_tolerance=paceline.FaultTolerance(enabled=False))
    return fit(config, model=build_large)


@pytest.mark.parametrize(("rank", "step"), [(0, 11), (1, 11), (1, 13)])
def test_of_two_ranks_with_a_large_model_the_odd_one_is_named(rank, step, tmp_path, large):
    folder = tmp_path / "run"
    config = supervised(folder, 2, epochs=3, checkpoint=CheckpointConfig(every_steps=7))
    flips = Flips(tmp_path / "mark", step, rank, bit=22)
    history = fit(config, [flips], model=build_large)
    assert (tmp_path / "mark").exists()
    assert history.state_hash == large.state_hash
    assert [(one.rank, one.cause) for one in of(events.WorkerFailed, folder)] == [(rank, "dissent")]
    assert [one.rank for one in of(events.Verdict, folder)] == [rank]
    audited(folder)
    verified = verify_fit(
        small_run.trainer(config, [flips], model=build_large), folder, None, small_run.data()
    )
    assert verified.same
    assert verified.complete


class FlipsAndEndsTheSupervisor(Flips):
    """As Flips; when the steps are computed again, the supervisor is killed, and the next one awaited."""

    folder: Path

    def change_gradients(self, parameters):
        again = self.mark.with_suffix(".again")
        begun = self.mark.exists()
        super().change_gradients(parameters)
        if begun and self.seen == self.step and self.rank == int(os.environ["RANK"]) and not again.exists():
            again.touch()
            (first,) = of(events.SupervisorStarted, self.folder)
            os.kill(first.pid, signal.SIGKILL)
            wait_for(lambda: len(of(events.SupervisorStarted, self.folder)) == 2)


def test_a_dispute_is_decided_after_a_restart_of_the_supervisor(tmp_path, large):
    folder = tmp_path / "run"
    config = supervised(folder, 2, epochs=3, checkpoint=CheckpointConfig(every_steps=7))
    flips = FlipsAndEndsTheSupervisor(tmp_path / "mark", 11, 1, bit=22)
    flips.folder = folder
    history = fit(config, [flips], model=build_large)
    assert len(of(events.SupervisorStarted, folder)) == 2
    assert history.state_hash == large.state_hash
    assert [(one.rank, one.cause) for one in of(events.WorkerFailed, folder)] == [(1, "dissent")]
    audited(folder)


@pytest.mark.parametrize(("rank", "killed"), [(0, 1), (1, 0)])
def test_the_only_one_left_had_something_else_than_the_one_that_is_gone(rank, killed, tmp_path, undisturbed):
    """The bit flips in the update: the rank's own look after it has seen nothing else."""
    folder = tmp_path / "run"
    chaos = f"kill rank={killed} step=14 phase=backward"
    history = fit(supervised(folder, 2, chaos), [Flips(tmp_path / "mark", 13, rank)])
    assert (tmp_path / "mark").exists()
    assert history.state_hash == undisturbed.state_hash
    (resumed,) = of(events.RunResumed, folder)
    assert resumed.step <= 12
    assert resumed.disowned
    audited(folder)


class FlipsAfterTheUpdate(Flips):
    """The bit flips when the step is committed, before the next exchange."""

    def change_gradients(self, parameters):
        self.parameter = next(iter(parameters.values()))

    def stop(self, record):
        if record.step == self.step and os.environ.get("RANK") == str(self.rank) and not self.mark.exists():
            self.mark.touch()
            flip(self.parameter, self.bit)


@pytest.mark.parametrize(("workers", "rank", "killed"), [(2, 0, (1,)), (2, 1, (0,)), (3, 1, (0, 2))])
def test_the_only_one_left_finds_that_its_memory_has_changed(workers, rank, killed, tmp_path, undisturbed):
    """No peer is left that could tell: its state is handed to none."""
    folder = tmp_path / "run"
    chaos = "; ".join(f"kill rank={other} step=14 phase=backward" for other in killed)
    flips = FlipsAfterTheUpdate(tmp_path / "mark", 13, rank)
    history = fit(supervised(folder, workers, chaos), [flips])
    assert (tmp_path / "mark").exists()
    assert history.state_hash == undisturbed.state_hash
    assert [one.rank for one in of(events.WorkerFailed, folder) if one.cause == "dissent"] == [rank]
    audited(folder)


def test_weights_that_a_callback_writes_past_torch_are_no_fault(tmp_path):
    """Of the only one left, and on every rank of a group: as many do who clip weights."""

    class Clips(Modifier):
        def change_gradients(self, parameters):
            self.parameters = list(parameters.values())

        def stop(self, record):
            for parameter in self.parameters:
                parameter.data.clamp_(-0.2, 0.2)

    alone = fit(
        settings(tmp_path / "one", 1, fault_tolerance=paceline.FaultTolerance(enabled=False)), [Clips()]
    )
    folder = tmp_path / "run"
    history = fit(supervised(folder, 2, "kill rank=1 step=14 phase=backward"), [Clips()])
    assert history.state_hash == alone.state_hash
    assert [one.cause for one in of(events.WorkerFailed, folder)] == ["crash"]
