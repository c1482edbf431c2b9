"""Lines of a plain loop that were left in a session: each is refused, or leaves the bits as they are."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import pytest
import torch
from tests.frontends.session_parts import X, Y, build, config
from tests.one_thread import one_thread as one_thread
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.core.errors import UsageError
from paceline.frontends.spawn import spawn
from paceline.train.state.model_state import state_hash
from paceline.train.step.misuse_guard import GradientWatch

Body = Callable[[Any, Any, nn.Module, Any], None]


def plain(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    run.backward(F.mse_loss(model(micro.x), micro.y))


def loop(folder: Path, body: Body, make: Callable[[nn.Module], Any] | None = None, **given: Any) -> nn.Module:
    model = build()
    optimizers = torch.optim.AdamW(model.parameters(), 0.01) if make is None else make(model)
    with paceline.session(model, optimizers, config(run_dir=folder, **given)) as run:
        for micro in run.microbatches((X, Y)):
            body(run, micro, model, optimizers)
    return model


def several(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(child.parameters(), 0.1) for child in model if list(child.parameters())]


def every(optimizers: Any) -> list[torch.optim.Optimizer]:
    return optimizers if isinstance(optimizers, list) else [optimizers]


def zero_before(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    every(optimizers)[-1].zero_grad()
    plain(run, micro, model, optimizers)


def zero_after(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    every(optimizers)[-1].zero_grad(set_to_none=False)


def step_after(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    every(optimizers)[-1].step()


def scaler_after(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    run.backward(scaler.scale(F.mse_loss(model(micro.x), micro.y)))
    scaler.step(every(optimizers)[-1])


@pytest.mark.parametrize("make", [None, several])
@pytest.mark.parametrize(
    ("body", "called"),
    [(zero_before, "zero_grad"), (zero_after, "zero_grad"), (step_after, "step"), (scaler_after, "step")],
)
def test_optimizer_calls_are_refused_at_the_call(
    tmp_path: Path, body: Body, called: str, make: Callable[[nn.Module], Any] | None
) -> None:
    with pytest.raises(
        UsageError, match=rf"\.{called}\(\) was called inside the loop of a session"
    ) as caught:
        loop(tmp_path / "run", body, make)
    assert "delete the line" in caught.value.remedy


def module_zero(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    model.zero_grad()


def part_zero(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    model.get_submodule("0").zero_grad(set_to_none=False)


def clip(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def backward_twice(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    loss = F.mse_loss(model(micro.x), micro.y)
    loss.backward(retain_graph=True)
    run.backward(loss)


def backward_besides(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    F.mse_loss(model(micro.x), micro.y).backward()


def clamp_data(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    """Of many reinforcement learning loops. No version counter moves."""
    plain(run, micro, model, optimizers)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-6, 1e-6)


def unscale(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    """Nor does a GradScaler move one."""
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    run.backward(scaler.scale(F.mse_loss(model(micro.x), micro.y)))
    scaler.unscale_(optimizers)


@pytest.mark.parametrize("micro_batch", [1, 3])
@pytest.mark.parametrize(
    "body", [module_zero, part_zero, clip, backward_twice, backward_besides, clamp_data, unscale]
)
def test_gradients_that_something_else_changes(tmp_path: Path, body: Body, micro_batch: int) -> None:
    with pytest.raises(UsageError, match=r"step 1: .*gradients .* by something other than the run's own"):
        loop(tmp_path / "run", body, micro_batch=micro_batch)


def by_hand(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)


def unbound(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    """What a method that was compiled or kept before the session comes down to."""
    plain(run, micro, model, optimizers)
    type(optimizers).step(optimizers)


def by_data(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    for parameter in model.parameters():
        parameter.data.mul_(0.99)


def other_data(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
    plain(run, micro, model, optimizers)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.99


@pytest.mark.parametrize("body", [by_hand, unbound, by_data, other_data])
def test_weights_that_something_else_changes(tmp_path: Path, body: Body) -> None:
    with pytest.raises(UsageError, match=r"step 1: weights .* changed before the step's gradient"):
        loop(tmp_path / "run", body)


def test_a_layer_that_changes_its_weights_in_forward(tmp_path: Path) -> None:
    """On two workers each would have renormalised other rows."""
    words = torch.randint(0, 9, (12, 3), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(12, 1))
    trainer = paceline.Trainer(
        model,
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=config(run_dir=tmp_path, workers=2, fault_tolerance=paceline.FaultTolerance(enabled=False)),
    )
    with pytest.raises(UsageError, match=r"weights \(0\.weight, .* changed before the step's gradient"):
        trainer.fit((words, torch.zeros(12, 1)))


@final
class Normalised(nn.Module):
    """A weight that is kept small by its own forward, in a way that moves no version counter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        self.linear.weight.data.mul_(0.9)
        return self.linear(x)


@pytest.mark.parametrize("workers", [1, 2])
def test_weights_that_forward_changes_through_data(tmp_path: Path, workers: int) -> None:
    """It happened once for each shard of a worker: other bits on each number of workers, without a word."""
    trainer = paceline.Trainer(
        Normalised,
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=config(
            run_dir=tmp_path, workers=workers, fault_tolerance=paceline.FaultTolerance(enabled=False)
        ),
    )
    with pytest.raises(UsageError, match=r"weights \(linear\.weight, .* changed before the step's gradient"):
        trainer.fit((torch.ones(12, 4), torch.zeros(12, 2)))


def test_one_damaged_word_of_the_weights_is_no_mistake_of_the_program() -> None:
    """The ranks find it and repair it (agreement.py); an error here would end the run."""
    parameter = nn.Parameter(torch.ones(64))
    watch = GradientWatch({"weight": parameter})
    watch.opened(0)
    watch.start_shard()
    parameter.data[5] = 2.0
    watch.finish_shard(1)
    parameter.data[6] = 2.0
    watch.start_shard()
    with pytest.raises(UsageError, match="weights"):
        watch.finish_shard(1)


def test_a_weight_that_is_replaced_by_a_smaller_one_is_refused_and_not_read_beyond_its_end() -> None:
    parameter = nn.Parameter(torch.ones(1 << 24))
    watch = GradientWatch({"weight": parameter})
    watch.opened((1 << 17) + 5)
    watch.start_shard()
    parameter.data = torch.ones(2)
    with pytest.raises(UsageError, match="weights"):
        watch.finish_shard(1)


def test_scheduler_of_torch_is_refused(tmp_path: Path) -> None:
    schedulers: list[Any] = []

    def body(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
        if not schedulers:
            schedulers.append(torch.optim.lr_scheduler.StepLR(optimizers, 1, gamma=0.5))
        plain(run, micro, model, optimizers)
        schedulers[0].last_epoch = 0
        optimizers.param_groups[0]["lr"] *= 0.5

    with pytest.raises(UsageError, match="the learning rate of group 0"):
        loop(tmp_path / "run", body)


def test_the_runs_own_update_is_not_blocked(tmp_path: Path) -> None:
    """Hooks, a scheduler's wrapper and an optimizer that clears gradients within its step all stay as they
    were, and the optimizer is free again after the loop."""
    usual = state_hash(loop(tmp_path / "usual", plain))
    kept: list[Any] = []

    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        """A scheduler that was made and is never stepped wraps optimizer.step."""
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        kept.append(torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0))
        return optimizer

    assert state_hash(loop(tmp_path / "scheduled", plain, scheduled)) == usual
    seen: list[int] = []

    class Clearing(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.zero_grad()
            return None

    def hooked(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = Clearing(model.parameters(), 0.01)
        optimizer.register_step_post_hook(lambda *_: seen.append(1))
        made.append(optimizer)
        return optimizer

    made: list[torch.optim.Optimizer] = []
    model = loop(tmp_path / "hooked", plain, hooked)
    assert state_hash(model) == usual
    assert len(seen) == 2 * 6  # of both classes' step
    assert "step" not in vars(made[0])
    assert "zero_grad" not in vars(made[0])
    made[0].zero_grad()
    made[0].step()


def test_what_leaves_the_run_alone_is_allowed(tmp_path: Path) -> None:
    """Another model's training, a copy of the model, a pickle of it, gradients by autograd.grad."""
    other = nn.Linear(5, 2)
    others = torch.optim.SGD(other.parameters(), 0.1)

    def body(run: Any, micro: Any, model: nn.Module, optimizers: Any) -> None:
        others.zero_grad()
        other(micro.x).sum().backward()
        others.step()
        copied = copy.deepcopy(model)
        copied.zero_grad()
        torch.save(model, io.BytesIO())
        state = torch.get_rng_state()
        torch.autograd.grad(model(micro.x).sum(), list(model.parameters()))
        torch.set_rng_state(state)
        plain(run, micro, model, optimizers)

    assert state_hash(loop(tmp_path / "a", body)) == state_hash(loop(tmp_path / "b", plain))


def wrapped(ctx: Any, folder: Path, inside: bool) -> str:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}.store", rank=ctx.rank, world_size=ctx.world_size
    )
    try:
        model = build()
        parallel = nn.parallel.DistributedDataParallel(model)
        given = parallel if inside else model
        optimizer = torch.optim.AdamW(given.parameters(), 0.01)
        with pytest.raises(UsageError) as caught, paceline.session(given, optimizer, config(run_dir=folder)):
            raise AssertionError
        trainer = paceline.Trainer(given, nn.MSELoss(), optimizer=optimizer, config=config(run_dir=folder))
        with pytest.raises(UsageError, match="summed twice"):
            trainer.fit((X, Y))
        return str(caught.value)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("inside", [True, False])
def test_torchs_ddp_around_the_model_is_refused(tmp_path: Path, inside: bool) -> None:
    for text in spawn(wrapped, tmp_path / "run", inside, workers=2, threads=1, timeout=60):
        assert "DistributedDataParallel" in text
        assert "summed twice" in text
