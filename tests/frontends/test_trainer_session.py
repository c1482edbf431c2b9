"""`paceline.session`: a loop of one's own has the bits of `Trainer`, and mistakes in it are named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.session_parts import X, Y, build, config, own_loop
from tests.one_thread import one_thread as one_thread
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.comm.context import DistributedContext
from paceline.core.errors import ConfigError, UsageError
from paceline.frontends.spawn import spawn
from paceline.train.loop import worker_jobs
from paceline.train.state.model_state import state_hash


def trainers_hash(**given: Any) -> str:
    job = worker_jobs.TrainJob(
        build(),
        nn.MSELoss(),
        lambda p: torch.optim.AdamW(p, 0.01),
        config(**given).resolved(1),
        (X, Y),
    )
    with DistributedContext(1, 0) as context:
        history = worker_jobs.train(context, job).history
    assert history is not None
    return history.state_hash


def test_same_bits_as_the_trainer(tmp_path: Path) -> None:
    model, history = own_loop(tmp_path / "run")
    assert history.state_hash == state_hash(model) == trainers_hash()
    assert [record.samples for record in history.steps] == [12, 12, 5] * 2
    # Four shards of three samples, in micro-batches of two and of one.
    assert history.steps[0].metrics == {"count": pytest.approx(4 * (2 * 2 + 1 * 1) / 12)}
    assert (tmp_path / "run" / "checkpoints").exists()


def test_under_bf16(tmp_path: Path) -> None:
    """The user's forward pass is inside autocast; code after the loop is not, though it ended by an error."""
    _, history = own_loop(tmp_path / "a", precision="bf16")
    assert history.state_hash == trainers_hash(precision="bf16")
    assert history.state_hash != trainers_hash()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        paceline.session(model, optimizer, config(run_dir=tmp_path / "b", precision="bf16")) as run,
    ):
        for micro in run.microbatches((X, Y)):
            assert torch.is_autocast_enabled("cpu")
            assert model(micro.x).dtype == torch.bfloat16
            raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")


def in_a_job(ctx: Any, folder: Path) -> str:
    model, _ = own_loop(folder, workers=1)
    return state_hash(model)


def test_joins_spawned_ranks(tmp_path: Path) -> None:
    found = spawn(in_a_job, tmp_path / "run", workers=3, threads=1, timeout=60)
    assert set(found) == {trainers_hash()}


UNDER_TORCHRUN = """
import os
import sys
from pathlib import Path
from tests.frontends.session_parts import own_loop
from paceline.train.state.model_state import state_hash
model, history = own_loop(Path(sys.argv[1]), workers=1)
Path(sys.argv[1] + f".{os.environ['RANK']}").write_text(state_hash(model))
"""


def test_joins_ranks_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_TORCHRUN)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
         str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {(tmp_path / f"run.{rank}").read_text() for rank in range(2)} == {trainers_hash()}


# mistakes


def test_backward_is_due_once_for_every_micro_batch(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def loop(folder: str, times: int) -> None:
        with paceline.session(model, optimizer, config(run_dir=tmp_path / folder)) as run:
            for micro in run.microbatches((X, Y)):
                for _ in range(times):
                    run.backward(F.mse_loss(model(micro.x), micro.y))

    with pytest.raises(
        UsageError, match="a micro-batch of 2 samples was handed out and no backward came back"
    ):
        loop("never", 0)
    with pytest.raises(UsageError, match="without a micro-batch, or twice for one"):
        loop("twice", 2)


def test_other_mistakes(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    with (
        pytest.raises(UsageError, match="backward before the first micro-batch"),
        paceline.session(model, optimizer, config(run_dir=tmp_path / "a")) as run,
    ):
        run.backward(torch.zeros(()))
    with (  # noqa: PT012
        pytest.raises(UsageError, match="microbatches was called twice"),
        paceline.session(model, optimizer, config(run_dir=tmp_path / "b", epochs=1)) as run,
    ):
        for micro in run.microbatches((X, Y)):
            run.backward(F.mse_loss(model(micro.x), micro.y))
        next(iter(run.microbatches((X, Y))))
    not_a_module: Any = build
    with (
        pytest.raises(UsageError, match="a session trains a module, not a function"),
        paceline.session(not_a_module, optimizer),
    ):
        pass
    with (
        pytest.raises(UsageError, match="profile='traces' in a session") as info,
        paceline.session(model, optimizer, config(profile="traces")),
    ):
        pass
    assert "torch.profiler" in info.value.remedy


def test_a_loop_that_is_left_gives_its_step_up(tmp_path: Path) -> None:
    """The half of a step that was computed has changed nothing, not even running statistics."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with paceline.session(model, optimizer, config(run_dir=tmp_path / "run", micro_batch=None)) as run:
        seen = ""
        for micro in run.microbatches((X, Y)):
            if run.step == 1 and not seen:
                seen = state_hash(model)
            run.backward(F.mse_loss(model(micro.x), micro.y))
            if run.step == 1 and micro.shard == 2:
                break
    assert run.history is not None
    assert state_hash(model) == seen == run.history.state_hash
    assert [record.step for record in run.history.steps] == [1]


def test_a_session_without_a_loop(tmp_path: Path) -> None:
    model = build()
    with paceline.session(
        model, torch.optim.SGD(model.parameters(), 0.1), config(run_dir=tmp_path / "run")
    ) as run:
        assert (run.step, run.epoch) == (0, 0)
    assert run.history is None


class NeverStops(paceline.Modifier):
    def stop(self, record: Any) -> str | None:
        return None


@pytest.mark.parametrize("every", [None, 1])
def test_a_run_whose_loop_was_left_can_go_on(tmp_path: Path, every: int | None) -> None:
    def loop(folder: str, until: int | None, resume: str | None = None) -> Any:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        saving = paceline.CheckpointConfig(every_steps=every, every_epochs=None)
        given = config(run_dir=tmp_path / folder, resume=resume, checkpoint=saving)
        with paceline.session(model, optimizer, given, callbacks=[NeverStops()]) as run:
            for micro in run.microbatches((X, Y)):
                run.backward(F.mse_loss(model(micro.x), micro.y))
                if run.step == until:
                    break
        return run.history

    left = loop("parts", 2)
    assert left.stopped == "the loop was left"
    assert len(left.steps) == 2
    again = loop("parts", None, "auto")
    assert again.stopped is None
    assert again.state_hash == loop("whole", None).state_hash


def test_what_the_loop_must_not_change(tmp_path: Path) -> None:
    def loop(folder: str, change: Any, **given: Any) -> None:
        model: Any = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with paceline.session(model, optimizer, config(run_dir=tmp_path / folder, **given)) as run:
            for micro in run.microbatches((X, Y)):
                run.backward(F.mse_loss(model(micro.x), micro.y))
                change(model, optimizer)

    def rate(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-9

    def group(model: Any, optimizer: Any) -> None:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    def freeze(model: Any, optimizer: Any) -> None:
        model[0].weight.requires_grad_(False)

    with pytest.raises(UsageError, match="group 0 of SGD is 1e-09, and that is not what the run's schedule"):
        loop("rate", rate)
    with pytest.raises(UsageError, match="the parameter groups of SGD changed"):
        loop("group", group)
    with pytest.raises(UsageError, match=r"requires_grad of 0\.weight changed during"):
        loop("freeze", freeze)
    with pytest.raises(ConfigError, match="evaluate_every=2 steps, and there is no validation data"):
        loop("evaluate", freeze, evaluate_every=2)


def test_losses_that_are_none(tmp_path: Path) -> None:
    def loop(folder: str, loss: Any) -> None:
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with paceline.session(model, optimizer, config(run_dir=tmp_path / folder)) as run:
            for micro in run.microbatches((X, Y)):
                run.backward(loss(model(micro.x)))

    with pytest.raises(UsageError, match="the loss is a float"):
        loop("float", lambda output: 1.0)
    with pytest.raises(UsageError, match=r"the loss is a tensor of shape \(2, 2\)"):
        loop("vector", lambda output: output)
    with pytest.raises(UsageError, match="the loss does not depend on any parameter"):
        loop("constant", lambda output: output.detach().mean())


def test_a_model_that_does_not_know_its_sizes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with (
        pytest.raises(UsageError, match="have no size yet"),
        paceline.session(model, optimizer, config(run_dir=tmp_path / "run")),
    ):
        pass
