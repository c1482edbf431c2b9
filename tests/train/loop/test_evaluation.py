"""Evaluation and prediction: the same for any number of workers, weighted by samples, in the data's order."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tests.train.running import job, mlp, regression, seeded, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.data.source_interface import SkippedSampleError
from paceline.testing.thread_transport import run_ranks
from paceline.train.loop import process_setup, worker_jobs
from paceline.train.loop.worker_jobs import TrainJob

SAMPLES = 29
X, Y = regression(SAMPLES)
LABELS = torch.arange(SAMPLES) % 2


def number(scalar: Tensor) -> float:
    return float(scalar.detach())


def everywhere(
    function: Callable[[DistributedContext, TrainJob], Any],
    given: TrainJob,
    workers: Sequence[int] = (1, 2, 3),
) -> list[list[Any]]:
    """What every rank gets, for each number of workers."""
    found = []
    for count in workers:
        mine = dataclasses.replace(given, config=dataclasses.replace(given.config, workers=count))
        models = [given.model, *(copy.deepcopy(given.model) for _ in range(count - 1))]

        def one(context: DistributedContext, mine: TrainJob = mine, models: list[Any] = models) -> Any:
            return function(context, dataclasses.replace(mine, model=models[context.rank]))

        with process_setup.prepared(mine.config):
            found.append(run_ranks(count, one, timeout=30))
    return found


def assert_same_everywhere(given: TrainJob) -> dict[str, float]:
    found: list[dict[str, float]] = [
        result for ranks in everywhere(worker_jobs.evaluate, given) for result in ranks
    ]
    assert all(result == found[0] for result in found)
    return found[0]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(zip(X, Y, strict=True))


@pytest.mark.parametrize("size", [1, 4, 12, 13, 29])
def test_the_mean_over_samples_whatever_the_batches(size: int) -> None:
    given = job(mlp(), (X[:size], Y[:size]), global_batch=24, shards=6)
    found = assert_same_everywhere(given)
    model: Any = given.model
    with torch.no_grad():
        per_sample = F.mse_loss(model(X[:size]), Y[:size], reduction="none").mean(1)
    assert found["loss"] == pytest.approx(float(per_sample.double().mean()), rel=1e-6)


def test_metrics_and_accuracy() -> None:
    def objective(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        x, y = batch
        error = (model(x) - y).abs().mean()
        return F.mse_loss(model(x), y), {"error": error, "constant": 3.0}

    found = assert_same_everywhere(job(mlp(), (X, Y), objective=objective))
    model: Any = mlp()
    assert found["error"] == pytest.approx(number((model(X) - Y).abs().mean()), rel=1e-6)
    assert found["constant"] == 3.0
    right = float((model(X).argmax(1) == LABELS).float().mean())
    losses: list[Any] = [
        nn.CrossEntropyLoss(),
        F.cross_entropy,
        partial(F.cross_entropy, label_smoothing=0.0),
    ]
    for loss in losses:
        found = assert_same_everywhere(job(mlp(), (X, LABELS), objective=loss))
        assert found["accuracy"] == pytest.approx(right)
        assert found["loss"] == pytest.approx(number(F.cross_entropy(model(X), LABELS)), rel=1e-6)


def test_a_stream_gives_what_the_same_samples_by_number_give() -> None:
    assert assert_same_everywhere(job(mlp(), Stream())) == assert_same_everywhere(job(mlp(), (X, Y)))


def test_dropout_is_off_and_modes_come_back() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.5), nn.BatchNorm1d(2))
    model[2].eval()
    given = job(model, (X, Y))
    found = assert_same_everywhere(given)
    assert found["loss"] == pytest.approx(number(F.mse_loss(model[2](model[0](X)), Y)), rel=1e-6)
    assert [child.training for child in model] == [True, True, False]
    assert model[1].training


def test_evaluation_during_training_changes_no_bit_of_it() -> None:
    plain = train(job(mlp(), (X, Y), epochs=2), 2)
    given = job(mlp(), (X, Y), epochs=2, validation=(X[:13], Y[:13]), evaluate_every=2)
    evaluated = train(given, 2)
    assert evaluated.hash == plain.hash
    assert [(e.step, e.samples) for e in evaluated.history.evaluations] == [(2, 13), (4, 13), (6, 13)]
    again = assert_same_everywhere(job(evaluated.module, (X[:13], Y[:13])))
    assert evaluated.history.evaluations[-1].metrics == again


def test_no_data_is_an_error() -> None:
    with pytest.raises(UsageError, match="no sample to evaluate"):
        everywhere(worker_jobs.evaluate, job(mlp(), (X[:0], Y[:0])), (1,))
    with pytest.raises(UsageError, match="no sample to predict"):
        everywhere(worker_jobs.predict, job(mlp(), (X[:0], Y[:0])), (2,))


# prediction


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Outputs(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        forms: dict[str, Any] = {
            "tensor": x * 2,
            "tuple": (x * 2, x[:, 0]),
            "list": [x * 2, x[:, 0]],
            "dict": {"double": x * 2, "inner": (x[:, 0],)},
            "named": Pair(x * 2, x[:, 0]),
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict", "named"])
def test_predictions_in_the_order_of_the_data(form: str) -> None:
    for ranks in everywhere(worker_jobs.predict, job(Outputs(form), (X, Y))):
        assert all(result is None for result in ranks[1:])
        expected = Outputs(form)(X)
        assert type(ranks[0]) is type(expected)
        flat, _ = torch.utils._pytree.tree_flatten(ranks[0])
        right, _ = torch.utils._pytree.tree_flatten(expected)
        for mine, theirs in zip(flat, right, strict=True):
            assert torch.equal(mine, theirs)


class Keywords(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale[:, None]


@pytest.mark.parametrize(
    "data",
    [X, (X,), (X, Y), TensorDataset(X), TensorDataset(X, Y), Stream(), DataLoader(TensorDataset(X, Y))],
    ids=["tensor", "alone", "pair", "dataset", "dataset of pairs", "stream", "loader"],
)
def test_inputs_of_every_kind(data: Any) -> None:
    for ranks in everywhere(worker_jobs.predict, job(Outputs("tensor"), data), (1, 2)):
        assert torch.equal(ranks[0], X * 2)


def test_a_dict_becomes_keyword_arguments() -> None:
    data = {"x": X, "scale": torch.arange(29.0)}
    for ranks in everywhere(worker_jobs.predict, job(Keywords(), data), (1, 3)):
        assert torch.equal(ranks[0], X * torch.arange(29.0)[:, None])


def test_predictions_have_the_same_bits_for_any_number_of_workers() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 64), nn.GELU(), nn.Linear(64, 3)))
    found = [ranks[0] for ranks in everywhere(worker_jobs.predict, job(model, (X, Y)), (1, 2, 3, 6))]
    assert all(torch.equal(result, found[0]) for result in found)


class Text(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "no tensor"


def test_outputs_that_cannot_be_put_together() -> None:
    with pytest.raises(UsageError, match="the model returned a str"):
        everywhere(worker_jobs.predict, job(Text(), X), (1,))


# samples that cannot be read


class Damaged(Dataset):
    """Some samples are gone; the policy of the dataset is to leave them out."""

    def __init__(self, missing: set[int]) -> None:
        self.missing = missing

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index in self.missing:
            raise SkippedSampleError(f"record {index} is damaged")
        return X[index], Y[index]


def test_left_out_samples_do_not_count_in_an_evaluation() -> None:
    missing = {0, 3, 4, 5, 28}
    kept = [index for index in range(SAMPLES) if index not in missing]
    found = assert_same_everywhere(job(mlp(), Damaged(missing), global_batch=12, shards=4))
    model: Any = mlp()
    assert found["loss"] == pytest.approx(number(F.mse_loss(model(X[kept]), Y[kept])), rel=1e-6)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_left_out_samples_do_not_count_in_a_step(micro_batch: int | None) -> None:
    """The gradient is the mean over what was really there: equal to a loop over those samples alone."""
    missing = {1, 2, 3, 14}
    given = job(
        mlp(),
        Damaged(missing),
        global_batch=12,
        shards=4,
        shuffle=False,
        max_steps=2,
        micro_batch=micro_batch,
    )
    plain: Any = mlp()
    optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    losses = []
    for first in (0, 12):
        kept = [index for index in range(first, first + 12) if index not in missing]
        optimizer.zero_grad()
        loss = F.mse_loss(plain(X[kept]), Y[kept])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    outcomes = [train(given, workers) for workers in (1, 2, 4)]
    assert len({outcome.hash for outcome in outcomes}) == 1
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-5)
    assert [record.samples for record in outcomes[0].history.steps] == [9, 11]
    for mine, theirs in zip(outcomes[0].module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_left_out_samples_do_not_slow_running_statistics() -> None:
    norm = nn.BatchNorm1d(5, momentum=0.5)
    given = job(
        norm,
        Damaged({0, 1, 2}),
        objective=lambda model, batch: model(batch[0]).square().mean(),
        global_batch=12,
        shards=2,
        shuffle=False,
        max_steps=1,
    )
    ours: Any = train(given, 2).module
    mean = 0.5 * (X[3:6].mean(0) * 3 + X[6:12].mean(0) * 6) / 9
    torch.testing.assert_close(ours.running_mean, mean)


def loss_and_metric(model: nn.Module, batch: Any) -> Any:
    return F.mse_loss(model(batch[0]), batch[1]), {"one": 1.0}


def test_a_step_without_any_sample() -> None:
    for shards in (1, 3):
        given = job(
            mlp(),
            Damaged(set(range(12, 24))),
            objective=loss_and_metric,
            global_batch=12,
            shards=shards,
            shuffle=False,
            max_steps=2,
        )
        outcome = train(given, min(2, shards))
        assert [record.samples for record in outcome.history.steps] == [12, 0]
        assert [record.metrics["one"] for record in outcome.history.steps] == [pytest.approx(1.0), 0.0]
        assert outcome.losses[1] == 0.0
        one = train(job(mlp(), (X, Y), global_batch=12, shards=shards, shuffle=False, max_steps=1))
        assert outcome.hash == one.hash


def test_an_accuracy_is_an_exact_share() -> None:
    """Means in fp32 times counts would miss the last bits."""

    class Third(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.one_hot((x[:, 0] % 7 % 3 > 0).long(), 2).float()

    data = (torch.arange(21.0).unsqueeze(1), torch.zeros(21, dtype=torch.long))
    given = job(Third(), data, objective=nn.CrossEntropyLoss(), global_batch=21, micro_batch=7)
    assert assert_same_everywhere(given)["accuracy"] == 9 / 21


def test_metrics_that_differ_by_batch_are_named() -> None:
    def varying(model: nn.Module, batch: Any) -> Any:
        loss = model(batch[0]).mean()
        return loss, {"a": 0.5} if float(batch[1][0, 0]) < float(Y[:, 0].median()) else {"b": 0.5}

    with pytest.raises(UsageError, match=r"gave \['.', 'loss'\] for batch 0 and \['.', 'loss'\] for batch"):
        everywhere(worker_jobs.evaluate, job(mlp(), (X, Y), objective=varying, global_batch=1), (1,))
