"""Metrics over whole sets, more sets, an objective and a batch size for evaluation: the same bits on any
number of workers, and watched by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from tests.train.loop.test_evaluation import everywhere
from tests.train.running import job, mlp, regression, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import ConfigError, UsageError
from paceline.train.loop import worker_jobs
from paceline.train.loop.worker_jobs import TrainJob
from paceline.train.settings.evaluation_config import EvaluationConfig
from paceline.train.settings.train_config import CheckpointConfig, EarlyStopping

SAMPLES = 29
X, Y = regression(SAMPLES)
LABELS = (Y[:, 0] > 0.1).long()


def auc(outputs: Tensor, targets: Tensor) -> float:
    return float(roc_auc_score(targets, outputs.softmax(1)[:, 1]))


def f1(outputs: Tensor, targets: Tensor) -> Any:
    return torch.tensor(f1_score(targets, outputs.argmax(1)))


def uneven_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """A sum whose bits depend on the order of the samples."""
    return (outputs * torch.logspace(-6, 6, len(outputs)).unsqueeze(1)).cumsum(0)[-1].sum()


class MeanOutput:
    """As a metric of torchmetrics: collects batches, with sums whose bits depend on their order."""

    sync_on_compute = True

    def __init__(self) -> None:
        self.total, self.batches = torch.zeros(()), 0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        assert len(outputs) == len(targets)
        self.total, self.batches = self.total * 1.0001 + outputs.sum(), self.batches + 1

    def compute(self) -> dict[str, Any]:
        assert not self.sync_on_compute, "one rank alone computes: it must not wait for others"
        return {"mean": self.total / SAMPLES, "batches": self.batches}

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


def evaluated(given: TrainJob, how: EvaluationConfig) -> dict[str, float]:
    found = everywhere(worker_jobs.evaluate, dataclasses.replace(given, evaluation=how), (1, 2, 3, 4))
    first: dict[str, float] = found[0][0]
    assert all(result == first for ranks in found for result in ranks)
    return first


def classifier(data: Any = (X, LABELS), **given: Any) -> TrainJob:
    return job(mlp(), data, objective=nn.CrossEntropyLoss(), **given)


def test_functions_and_objects_see_all_samples_in_their_order_on_any_number_of_workers() -> None:
    given = classifier()
    metric = MeanOutput()
    how = EvaluationConfig(metrics={"auc": auc, "f1": f1, "uneven": uneven_mean, "collected": metric})
    found = evaluated(given, how)
    model: Any = given.model
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in X.split(2)])
    assert found["auc"] == pytest.approx(auc(outputs, LABELS))
    assert found["f1"] == float(f1(outputs, LABELS))
    assert found["uneven"] == pytest.approx(float(uneven_mean(outputs, LABELS)), rel=1e-5)
    assert found["collected/batches"] == 15
    assert {"loss", "accuracy", "collected/mean"} < found.keys()
    assert metric.batches == 0, "the caller's object is left as it is"
    # A mean over batches would be something else.
    parts = [
        auc(o, t) for o, t in zip(outputs.split(5), LABELS.split(5), strict=True) if len(set(t.tolist())) == 2
    ]
    assert found["auc"] != pytest.approx(sum(parts) / len(parts))


@pytest.mark.parametrize("size", [1, 5, 29, 1000])
def test_a_batch_size_of_evaluation_alone(size: int) -> None:
    metric = MeanOutput()
    found = evaluated(classifier(), EvaluationConfig(metrics={"m": metric}, batch_size=size))
    assert found["m/batches"] == -(-SAMPLES // size)
    # It does not depend on how training is cut either.
    other = classifier(global_batch=24, shards=4)
    assert evaluated(other, EvaluationConfig(metrics={"m": metric}, batch_size=size)) == found


class Rows(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, LABELS, strict=True))


def test_a_stream_is_in_order_too() -> None:
    how = EvaluationConfig(metrics={"uneven": uneven_mean, "auc": auc}, batch_size=4)
    assert evaluated(classifier(Rows()), how) == evaluated(classifier(), how)


def test_an_objective_and_outputs_of_evaluation_alone() -> None:
    def distance(model: Any, batch: Any) -> Any:
        return (model(batch["x"]) - batch["y"]).abs().mean(), {"bias": 2.0}

    given = job(mlp(), {"x": X, "y": Y}, objective=lambda m, b: F.mse_loss(m(b["x"]), b["y"]))
    how = EvaluationConfig(
        objective=distance,
        metrics={"worst": lambda outputs, targets: (outputs - targets).abs().max()},
        outputs=lambda model, batch: (model(batch["x"]), batch["y"]),
    )
    found = evaluated(given, how)
    model: Any = given.model
    with torch.no_grad():
        error = (model(X) - Y).abs()
    assert found["loss"] == pytest.approx(float(error.mean()), rel=1e-6)
    assert found["worst"] == pytest.approx(float(error.max()), rel=1e-6)
    assert found["bias"] == 2.0
    with pytest.raises(UsageError, match=r"this batch is a dict"):
        evaluated(given, EvaluationConfig(metrics={"worst": auc}))
    # A function of (model, batch) on pairs: the model is called once more.
    pairs = job(mlp(), (X, Y), objective=lambda m, b: F.mse_loss(m(b[0]), b[1]))
    only = EvaluationConfig(metrics={"worst": lambda outputs, targets: (outputs - targets).abs().max()})
    assert evaluated(pairs, only)["worst"] == pytest.approx(float(error.max()), rel=1e-6)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda outputs, targets: outputs[:2, 0], r"the metric 'bad' gave a value of shape \(2,\)"),
        (lambda outputs, targets: {"part": None}, r"the metric 'bad/part' gave a NoneType"),
        (lambda outputs, targets: "good", r"the metric 'bad' gave a str"),
    ],
)
def test_what_is_not_a_number_is_refused_by_name(metric: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluated(classifier(), EvaluationConfig(metrics={"bad": metric}))


def test_names_that_clash_and_outputs_without_rows_are_refused() -> None:
    with pytest.raises(UsageError, match="both give accuracy"):
        evaluated(classifier(), EvaluationConfig(metrics={"accuracy": f1}))
    whole = EvaluationConfig(
        metrics={"f1": f1}, outputs=lambda model, batch: (model(batch[0]).sum(), batch[1])
    )
    with pytest.raises(UsageError, match=r"the outputs of a batch of 2 are of shape \(\)"):
        evaluated(classifier(), whole)
    with pytest.raises(UsageError, match=r"EvaluationConfig.outputs returned a Tensor"):
        evaluated(
            classifier(), EvaluationConfig(metrics={"f1": f1}, outputs=lambda model, batch: model(batch[0]))
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "batch_size=0, which is less than 1"),
        ({"batch_size": "8"}, "batch_size is a str"),
        ({"metrics": [auc]}, "metrics is a list"),
        ({"metrics": {"loss": auc}}, "has the name of the loss itself"),
        ({"metrics": {"a/b": auc}}, "metrics has the name 'a/b'"),
        ({"sets": {"": (X, Y)}}, "sets has the name ''"),
        ({"outputs": auc}, "outputs are given and no metrics"),
        ({"objective": 3}, "objective is an int"),
        ({"batchsize": 3}, "EvaluationConfig has no setting 'batchsize'"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvaluationConfig(**given)


def test_a_metric_that_is_a_class_or_a_number_is_refused() -> None:
    with pytest.raises(UsageError, match="the metric 'm' is the class itself"):
        EvaluationConfig(metrics={"m": MeanOutput})
    with pytest.raises(UsageError, match="the metric 'm' is a float"):
        EvaluationConfig(metrics={"m": 0.5})


# in training


def trained(workers: int, how: EvaluationConfig, folder: Path | None = None, **given: Any) -> Any:
    run = job(
        mlp(), (X, LABELS), objective=nn.CrossEntropyLoss(), global_batch=8, shards=4, run_dir=folder, **given
    )
    return train(dataclasses.replace(run, evaluation=how), workers)


def test_several_sets_are_named_and_watched_by_name(tmp_path: Path) -> None:
    """The metric of the second set chooses the best version, and ends the run."""
    how = EvaluationConfig(
        metrics={"auc": auc}, sets={"noisy": (X + 0.5, LABELS), "small": (X[:9], LABELS[:9])}, batch_size=7
    )
    watching = {
        "epochs": 6,
        "early_stopping": EarlyStopping(metric="noisy/auc", mode="min", patience=2),
        "checkpoint": CheckpointConfig(every_epochs=1, metric="small/auc", mode="max", keep_last=9),
    }
    runs = [
        trained(workers, how, tmp_path / f"{workers}", validation=(X[:11], LABELS[:11]), **watching)
        for workers in (1, 2, 3, 4)
    ]
    first = runs[0].history.evaluations
    names = ("loss", "accuracy", "auc")
    assert list(first[0].metrics) == [*names, *(f"{s}/{n}" for s in ("noisy", "small") for n in names)]
    assert first[0].samples == 11 + SAMPLES + 9
    for run in runs[1:]:
        assert run.hash == runs[0].hash
        assert [one.metrics for one in run.history.evaluations] == [one.metrics for one in first]
    assert "early stopping: noisy/auc was not better" in runs[0].history.stopped
    store = CheckpointStore(tmp_path / "3" / "checkpoints")
    best = max(one.metrics["small/auc"] for one in first)
    assert store.open("best", metric="small/auc", mode="max").manifest.info.metrics["small/auc"] == best


def test_sets_without_validation_data_of_fit() -> None:
    how = EvaluationConfig(sets={"a": (X[:9], LABELS[:9]), "b": (X[9:], LABELS[9:])})
    metrics = trained(2, how, epochs=1).history.evaluations[-1].metrics
    assert list(metrics) == ["loss", "accuracy", "a/loss", "a/accuracy", "b/loss", "b/accuracy"]
    assert metrics["loss"] == metrics["a/loss"] != metrics["b/loss"]


def test_an_error_in_a_metric_names_it_and_the_set() -> None:
    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise ZeroDivisionError("no positives")

    how = EvaluationConfig(sets={"rare": (X[:9], LABELS[:9])}, metrics={"ratio": broken})
    with pytest.raises(ZeroDivisionError) as raised:
        trained(1, how, epochs=1)
    assert raised.value.__notes__[:2] == ["in the metric 'ratio'", "in the validation set 'rare'"]
