"""What a gradient does to the model: fp16 and its scale, clipping, schedules, growing batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.train.running import job, mlp, regression, train
from torch import Tensor, nn

from paceline.train.callbacks import Modifier
from paceline.train.settings.train_config import DynamicBatch, LossScaling
from paceline.train.step.weight_update import WeightUpdate, total_norm

DATA = regression(29)


# fp16


def overflowing_once(step: int) -> Any:
    """An objective whose gradient is infinite for one sample, which is in one shard of one step."""
    x, _ = DATA

    def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, target = batch
        loss = nn.functional.mse_loss(model(inputs).float(), target)
        hit = (inputs == x[step * 12 + 7]).all(1).any()
        return loss * (1e38 if bool(hit) else 1.0)

    return objective


def test_an_overflow_skips_the_step_on_all_workers_alike() -> None:
    given = job(
        mlp(),
        DATA,
        objective=overflowing_once(1),
        epochs=2,
        shuffle=False,
        precision="fp16",
        loss_scaling=LossScaling(initial=1024.0, growth_interval=2),
        optimizer=lambda p: torch.optim.Adam(p, 0.01),
    )
    outcomes = [train(given, workers) for workers in (1, 2, 3, 6)]
    assert len({outcome.hash for outcome in outcomes}) == 1
    for outcome in outcomes:
        assert [record.skipped for record in outcome.history.steps] == [False, True, False] * 2
    assert all(parameter.isfinite().all() for parameter in outcomes[0].module.parameters())


def test_an_overflow_of_the_only_shard() -> None:
    given = job(
        mlp(), DATA, objective=overflowing_once(1), max_steps=2, shuffle=False, shards=1, precision="fp16"
    )
    one = train(job(mlp(), DATA, max_steps=1, shuffle=False, shards=1, precision="fp16"))
    two = train(given)
    assert [record.skipped for record in two.history.steps] == [False, True]
    assert one.hash == two.hash


def test_the_scale_changes_no_bit_where_nothing_overflows() -> None:
    """Powers of two: scaling and unscaling are exact."""
    made = [
        train(job(mlp(), DATA, epochs=2, precision="fp16", loss_scaling=LossScaling(initial=initial))).hash
        for initial in (1024.0, 8192.0)
    ]
    assert made[0] == made[1]


# clipping


def test_norms_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((3, 4), (7,), ())]
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
    everything = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(total_norm(gradients), everything.norm())
    narrow = [torch.full((100,), 300.0, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)]
    torch.testing.assert_close(total_norm(narrow), torch.tensor(math.sqrt(300.0**2 * 100 + 2)))
    mixed = [torch.ones(2, dtype=torch.bfloat16), torch.full((3,), 1.0 + 1e-9, dtype=torch.float64)]
    assert float(total_norm(mixed)) == pytest.approx(math.sqrt(5), rel=1e-6)
    assert float(total_norm([])) == 0.0
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.tensor([[3.0], [1.0]]), (4, 1), check_invariants=True
    )
    assert float(total_norm([sparse, torch.tensor([3.0])])) == 5.0


def test_clipping_bounds_the_change() -> None:
    model = mlp()
    given = job(
        model, DATA, max_steps=1, clip_norm=1e-3, optimizer=lambda p: torch.optim.SGD(p, 1.0), epochs=1
    )
    outcome = train(given, 2)
    pairs = zip(outcome.module.parameters(), model.parameters(), strict=True)
    changes = [(after - before).detach() for after, before in pairs]
    assert float(total_norm(changes)) == pytest.approx(1e-3, rel=1e-2)
    (record,) = outcome.history.steps
    assert record.grad_norm is not None
    assert record.grad_norm > 1e-3, "the norm is that before clipping"


# schedules


def test_learning_rates_follow_the_schedule() -> None:
    given = job(
        mlp(),
        DATA,
        epochs=4,
        warmup_steps=2,
        schedule="linear",
        optimizer=lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.4}, {"params": p[2:], "lr": 0.8}]),
    )
    outcome = train(given, 2)
    rates = [record.learning_rate for record in outcome.history.steps]
    assert rates == pytest.approx([0.2, 0.4, *(0.4 * (1 - k / 10) for k in range(10))])
    own = train(job(mlp(), DATA, epochs=1, schedule=lambda step: 1.0 / (step + 1)))
    assert [record.learning_rate for record in own.history.steps] == pytest.approx([0.1, 0.05, 0.1 / 3])


def test_a_learning_rate_that_is_a_tensor() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.5), foreach=False, capturable=False)
    update = WeightUpdate({"p": parameter}, [optimizer], clip_norm=None, scaler=None)
    parameter.grad = torch.ones(1)
    assert update.apply(0.5).learning_rate == 0.25
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
    assert update.apply(1.0).learning_rate == 0.5


# growing batches


class Doubled(Modifier):
    def change_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for parameter in parameters.values():
            assert parameter.grad is not None
            parameter.grad.mul_(1000.0)


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
def test_the_batch_grows_the_same_on_any_number_of_workers(rule: str) -> None:
    noise = torch.randn(120, 2, generator=torch.Generator().manual_seed(9))
    given = job(
        mlp(),
        (regression(120)[0], noise),
        global_batch=8,
        shards=4,
        epochs=3,
        lr_rule=rule,
        dynamic_batch=DynamicBatch(8, 40, variance_threshold=0.5, smoothing=0.5, hold=3),
        optimizer=lambda p: torch.optim.SGD(p, 0.01),
    )
    outcomes = [train(given, workers) for workers in (1, 2, 3, 4)]
    assert len({outcome.hash for outcome in outcomes}) == 1
    steps = outcomes[0].history.steps
    sizes = [record.samples for record in steps]
    assert {8, 16, 32, 40} <= set(sizes)
    for outcome in outcomes[1:]:
        assert [record.samples for record in outcome.history.steps] == sizes
    factor = {"none": 1.0, "linear": 5.0, "sqrt": math.sqrt(5.0)}[rule]
    assert steps[sizes.index(40)].learning_rate == pytest.approx(0.01 * factor)


def test_modifiers_do_not_disturb_the_measured_noise() -> None:
    given: dict[str, Any] = {
        "global_batch": 8,
        "shards": 4,
        "epochs": 2,
        "dynamic_batch": DynamicBatch(8, 32, variance_threshold=0.5, smoothing=0.5, hold=3),
        "optimizer": lambda p: torch.optim.SGD(p, 0.0),
    }
    data = (regression(120)[0], torch.randn(120, 2, generator=torch.Generator().manual_seed(9)))
    without = train(job(mlp(), data, **given)).history
    with_modifier = train(job(mlp(), data, callbacks=[Doubled()], **given)).history
    assert [r.samples for r in with_modifier.steps] == [r.samples for r in without.steps]


class Embedded(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, sparse=sparse)
        with torch.no_grad():
            self.table.weight.copy_(torch.linspace(-1, 1, 27).view(9, 3))

    def forward(self, x: Tensor) -> Any:
        return self.table(x)


def test_the_noise_of_sparse_gradients_counts_too() -> None:
    words = torch.randint(0, 9, (90,), generator=torch.Generator().manual_seed(0))
    data = (words, torch.randn(90, 3, generator=torch.Generator().manual_seed(1)))
    sizes = []
    for sparse in (False, True):
        given = job(
            Embedded(sparse),
            data,
            global_batch=8,
            shards=4,
            epochs=2,
            dynamic_batch=DynamicBatch(8, 32, variance_threshold=0.5, smoothing=0.5, hold=3),
            optimizer=lambda p: torch.optim.SGD(p, 0.05),
        )
        sizes.append([record.samples for record in train(given, 2).history.steps])
    assert sizes[0] == sizes[1]
    assert max(sizes[0]) == 32
