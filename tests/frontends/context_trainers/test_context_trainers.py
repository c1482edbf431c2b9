"""Trainers on a context: the same bits for any number of ranks and any split of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline import AggregationMethod, TrainingStrategy
from paceline.core.errors import UsageError
from paceline.frontends.context_trainers import rank_data
from paceline.frontends.context_trainers.neural_net_trainer import DistributedNeuralNetTrainer
from paceline.testing.thread_transport import run_ranks

SAMPLES = 96
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0))
CLASSES = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def trainer(ctx: paceline.DistributedContext, **given: Any) -> DistributedNeuralNetTrainer:
    sizes = {"input_dim": 5, "hidden_dims": [16], "output_dim": 3, "learning_rate": 0.01, **given}
    return DistributedNeuralNetTrainer(ctx, TrainingStrategy.DATA_PARALLEL, **sizes)


def train_classes(ctx: paceline.DistributedContext, sizes: list[int] | None = None) -> dict[str, Any]:
    start, end = paceline.DataPartitioner(
        total_samples=SAMPLES, world_size=ctx.world_size, weights=sizes
    ).get_partition(ctx.rank)
    made = trainer(ctx)
    seen: list[tuple[int, float]] = []
    made.register_callback(lambda epoch, loss: seen.append((epoch, loss)))
    for _ in range(3):
        made.train_epoch(X[start:end], CLASSES[start:end])
    result: dict[str, Any] = {
        "parameters": made.get_parameters(),
        "seen": seen,
        "local": made.get_local_loss(),
        # One rank alone may ask.
        "global": made.get_global_loss() if ctx.rank == 0 else None,
        "right": float((made.predict(X).argmax(1) == CLASSES).float().mean()),
    }
    if ctx.rank:
        made.set_parameters(torch.zeros(len(result["parameters"])))
    made.synchronize_model()
    assert torch.equal(made.get_parameters(), result["parameters"])
    return result


def test_the_number_of_ranks_and_the_split_change_no_bit():
    alone = paceline.spawn(train_classes, workers=1)[0]
    assert [epoch for epoch, _ in alone["seen"]] == [1, 2, 3]
    assert alone["seen"][-1][1] < alone["seen"][0][1]
    assert alone["global"] == alone["seen"][-1][1]
    for workers, sizes in ((2, [1, 5]), (3, None), (4, [0, 2, 1, 1])):
        results = paceline.spawn(train_classes, sizes, workers=workers)
        for one in results:
            assert torch.equal(one["parameters"], alone["parameters"]), workers
            assert one["seen"] == alone["seen"]
            assert one["right"] == alone["right"]
        assert np.isnan(results[0]["local"]) == (sizes == [0, 2, 1, 1])


def train_adaptively(ctx: paceline.DistributedContext) -> tuple[tuple[int, ...], torch.Tensor]:
    made = paceline.DistributedAdaptiveTrainer(ctx, TrainingStrategy.DATA_PARALLEL, 5, [8], 1, 0.01)
    made.enable_dynamic_batching(min_batch=8, max_batch=32, variance_threshold=1e-9)
    noise = torch.randn(400, 1, generator=torch.Generator().manual_seed(1))
    rows = X.repeat(5, 1)[:400]
    start, end = paceline.DataPartitioner(400, ctx.world_size).get_partition(ctx.rank)
    for _ in range(2):
        made.train_epoch(rows[start:end].tolist(), noise[start:end].numpy())
    return made.batch_sizes, made.get_parameters()


def test_a_noisy_gradient_makes_the_batch_grow_and_it_stays_grown():
    ((sizes, alone),) = paceline.spawn(train_adaptively, workers=1)
    assert sizes[0] == 8
    assert sizes[-1] == 32
    assert list(sizes) == sorted(sizes)
    for got, parameters in paceline.spawn(train_adaptively, workers=2):
        assert got == sizes
        assert torch.equal(parameters, alone)


def test_kinds_go_in_and_come_out():
    with paceline.DistributedContext(1, 0) as ctx:
        made = trainer(ctx, output_dim=2)
        rows = X[:8]
        for kind in (rows, rows.numpy(), rows.tolist()):
            loss = made.train_epoch(kind, CLASSES[:8].clamp(max=1).tolist())
            assert loss == made.get_global_loss()
            out = made.predict(kind)
            assert type(out) is type(kind)
            assert np.shape(out) == (8, 2)
            assert np.shape(made.predict(kind[0])) == (2,)
        made.set_parameters(made.get_parameters().tolist())
        with pytest.raises(UsageError, match="3 parameters for a model of"):
            made.set_parameters([1.0, 2.0, 3.0])
        with pytest.raises(UsageError, match=r"shape \(8, 4\), and the model takes 5 numbers"):
            made.predict(X[:8, :4])
        with pytest.raises(UsageError, match="8 samples and 7 labels"):
            made.train_epoch(rows, CLASSES[:7])


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_mixed_precision_trains(scale):
    with paceline.DistributedContext(1, 0) as ctx:
        made = trainer(ctx, output_dim=3)
        made.set_mixed_precision(True)
        made.set_loss_scaling(scale)
        assert made.train_epoch(X, CLASSES) > made.train_epoch(X, CLASSES)


@pytest.mark.parametrize(
    ("labels", "outputs", "loss"),
    [
        (torch.tensor([0.5, 1.0]), 1, "MSELoss"),
        (torch.tensor([1, 2]), 1, "MSELoss"),
        (torch.tensor([[0.5, 1.0]]), 2, "MSELoss"),
        (torch.tensor([0, 2]), 3, "CrossEntropyLoss"),
        (torch.tensor([[0], [2]]), 3, "CrossEntropyLoss"),
        (torch.tensor([[0, 1], [1, 0]]), 2, "CrossEntropyLoss"),
        (torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 2, "CrossEntropyLoss"),
    ],
)
def test_the_labels_say_which_loss(labels, outputs, loss):
    assert type(rank_data.targets_and_loss(labels, outputs)[1]).__name__ == loss


def test_a_class_that_the_model_does_not_have_is_refused():
    with pytest.raises(UsageError, match=r"labels up to 3 .* for 3 outputs"):
        rank_data.targets_and_loss(torch.tensor([0, 3]), 3)


def test_gradients_are_aggregated():
    def rank(ctx: paceline.DistributedContext) -> None:
        made = trainer(ctx)
        own = torch.full((3,), float(ctx.rank))
        assert made.aggregate_gradients(own).tolist() == [0.5] * 3
        assert made.aggregate_gradients(own.numpy()).tolist() == [0.5] * 3
        elastic = AggregationMethod.ELASTIC_AVERAGING
        expected = [0.25 * ctx.rank + 0.75 * 0.5] * 3
        assert made.aggregate_gradients(own, elastic, alpha=0.25).tolist() == expected
        assert made.aggregate_gradients(own.tolist(), elastic, 0.25) == expected
        with pytest.raises(UsageError, match="ASYNCHRONOUS is not there yet"):
            made.aggregate_gradients(own, AggregationMethod.ASYNCHRONOUS)
        with pytest.raises(UsageError, match="alpha=2"):
            made.aggregate_gradients(own, alpha=2)

    run_ranks(2, rank)


def test_strategies_to_come_are_refused_by_name():
    with paceline.DistributedContext(1, 0) as ctx:
        for strategy in TrainingStrategy:
            if strategy is not TrainingStrategy.DATA_PARALLEL:
                with pytest.raises(UsageError, match=f"TrainingStrategy.{strategy.name} is not there yet"):
                    DistributedNeuralNetTrainer(ctx, strategy, 2, [3], 1, 0.1)
        with pytest.raises(UsageError, match="the context of a trainer is an int"):
            DistributedNeuralNetTrainer(3)  # type: ignore[arg-type]
