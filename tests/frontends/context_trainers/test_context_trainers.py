"""Trainers on a context: the same bits for any number of ranks and any split of the data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests.comm.transport.ranks import free_port

import paceline
from paceline import AggregationMethod, TrainingStrategy
from paceline.core.errors import ConfigError, PeerLostError, UsageError
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
        with pytest.raises(UsageError, match="8 samples and 1 label"):
            made.train_epoch(rows, torch.tensor(1))
        with pytest.raises(UsageError, match="the labels: a list that is not of numbers"):
            made.train_epoch(rows, ["a"] * 8)
        with pytest.raises(UsageError, match=r"the data: a tensor of torch\.complex64"):
            made.predict(rows + 0j)


def test_a_number_is_a_row_of_one():
    with paceline.DistributedContext(1, 0) as ctx:
        made = trainer(ctx, input_dim=1, output_dim=2)
        assert np.shape(made.predict(0.5)) == (2,)
        assert np.shape(made.predict([0.5, 0.7])) == (2, 2)
        frozen = np.asarray([0.5, 0.7], dtype=">f8")
        frozen.flags.writeable = False
        assert made.predict(frozen).tolist() == made.predict([0.5, 0.7])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hidden_dims": 8}, r"hidden_dims=8\n.*a list of the sizes"),
        ({"hidden_dims": "88"}, "hidden_dims='88'"),
        ({"learning_rate": True}, "learning_rate=True"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"input_dim": 0}, "input_dim=0"),
    ],
)
def test_settings_that_cannot_be(given, said):
    with paceline.DistributedContext(1, 0) as ctx, pytest.raises(UsageError, match=said):
        trainer(ctx, **given)


def test_settings_of_precision_and_of_a_growing_batch_that_cannot_be():
    with paceline.DistributedContext(1, 0) as ctx:
        made = paceline.DistributedAdaptiveTrainer(ctx, input_dim=5)
        with pytest.raises(UsageError, match="mixed precision of 'no'"):
            made.set_mixed_precision("no")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="the loss scale=inf"):
            made.set_loss_scaling(float("inf"))
        with pytest.raises(UsageError, match="enable_dynamic_batching: max_batch=32 is less than min_"):
            made.enable_dynamic_batching(min_batch=64, max_batch=32)


def train_with_an_empty_list(ctx: paceline.DistributedContext, empty: int) -> tuple[torch.Tensor, float]:
    made = trainer(ctx)
    rows, classes = X.tolist(), CLASSES.tolist()
    made.train_epoch(*([], []) if ctx.rank == empty else (rows, classes))
    return made.get_parameters(), made.get_local_loss()


def test_a_rank_without_data_may_pass_an_empty_list():
    ((alone, _),) = paceline.spawn(train_with_an_empty_list, 1, workers=1)
    for empty in (0, 1):
        results = paceline.spawn(train_with_an_empty_list, empty, workers=2)
        assert all(torch.equal(parameters, alone) for parameters, _ in results)
        assert [np.isnan(local) for _, local in results] == [empty == 0, empty == 1]


def test_the_loss_of_a_part_is_that_of_all_labels():
    def rank(ctx: paceline.DistributedContext) -> None:
        made = trainer(ctx, output_dim=2)
        # The second part alone would pass for one-hot rows.
        targets = torch.tensor([[0.5, 0.2]] * 4 if ctx.rank == 0 else [[0.0, 1.0]] * 4)
        rows = X[4 * ctx.rank :][:4]
        made.train_epoch(rows, targets)
        expected = torch.nn.functional.mse_loss(made.predict(rows), targets)
        assert made.get_local_loss() == pytest.approx(float(expected))

    run_ranks(2, rank)


def test_ranks_with_different_settings_are_refused_by_name():
    def rank(ctx: paceline.DistributedContext) -> None:
        made = trainer(ctx)
        made.set_mixed_precision(ctx.rank == 1)
        with pytest.raises(ConfigError, match=r"rank 1 has other settings than rank 0: .*fp32 -> bf16"):
            made.train_epoch(X[:8], CLASSES[:8])

    run_ranks(2, rank)


class Counting(paceline.DistributedTrainer):
    """A trainer of a user's own, whose parameters are an array."""

    def __init__(self, context: paceline.DistributedContext) -> None:
        super().__init__(context)
        self.values = np.full(3, float(context.rank))

    def train_epoch(self, local_data: Any, local_labels: Any) -> float:
        self.notify_callbacks(1, 0.5)
        return 0.5

    def get_parameters(self) -> Any:
        return self.values

    def set_parameters(self, parameters: Any) -> None:
        self.values = parameters

    def predict(self, data: Any) -> Any:
        return data


def test_a_trainer_of_ones_own():
    def rank(ctx: paceline.DistributedContext) -> None:
        made = Counting(ctx)
        seen: list[tuple[int, float]] = []
        made.register_callback(lambda epoch, loss: seen.append((epoch, loss)))
        assert made.train_epoch(None, None) == 0.5
        assert seen == [(1, 0.5)]
        made.synchronize_model(root_rank=1)
        assert made.get_parameters().tolist() == [1.0] * 3
        assert made.aggregate_gradients([1.0, 2.0]) == [1.0, 2.0]

    run_ranks(2, rank)
    with pytest.raises(TypeError, match="abstract"):
        paceline.DistributedTrainer(None)  # type: ignore[abstract, arg-type]


def test_a_callback_that_raises_is_raised_after_the_epoch():
    def broken(epoch: int, loss: float) -> None:
        raise ZeroDivisionError("on purpose")

    with paceline.DistributedContext(1, 0) as ctx:
        made = trainer(ctx)
        made.register_callback(broken)
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            made.train_epoch(X, CLASSES)
        assert made.epochs_trained == 1
        assert made.get_global_loss() > 0


def train_and_die(ctx: paceline.DistributedContext) -> None:
    made = trainer(ctx)
    if ctx.rank == 1:
        made.model.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    made.train_epoch(X, CLASSES)


def test_a_rank_that_is_killed_in_an_epoch_is_named():
    with pytest.raises(PeerLostError, match=r"rank 1 .* was killed by signal 9"):
        paceline.spawn(train_and_die, workers=3)


def test_ranks_of_several_hosts_train_together_and_keep_no_folder(tmp_path):
    """The first rank's temporary folder is not seen on another host."""
    ((alone, _),) = paceline.spawn(train_with_an_empty_list, 1, workers=1)
    with free_port() as port:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _ON_A_HOST],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    **os.environ,
                    "PACELINE_HOST": f"host-{rank}",
                    "TMPDIR": str(tmp_path),
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=110)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert all(one.split()[-1] == str(float(alone.double().sum())) for one in said), said
    assert list(tmp_path.iterdir()) == []


_ON_A_HOST = f"""
import paceline
from {__name__} import train_with_an_empty_list
with paceline.DistributedContext() as ctx:
    print(float(train_with_an_empty_list(ctx, 1)[0].double().sum()))
"""


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
    with pytest.raises(UsageError, match=r"labels from 0 to 3 .* for 3 outputs"):
        rank_data.targets_and_loss(torch.tensor([0, 3]), 3)
    with pytest.raises(UsageError, match=r"labels from -1 to 2 .* for 3 outputs"):
        rank_data.targets_and_loss(torch.tensor([-1, 2]), 3)


def test_float_labels_for_several_outputs_are_told_of_classes():
    with pytest.raises(UsageError, match=r"float labels of shape \(2,\) for 3 outputs\n.*whole numbers"):
        rank_data.targets_and_loss(torch.tensor([0.0, 2.0]), 3)


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
        assert made.aggregate_gradients(tuple(own.tolist()), elastic, 0.25) == tuple(expected)
        assert made.aggregate_gradients(np.float32(ctx.rank), elastic, 0.25) == expected[0]
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
