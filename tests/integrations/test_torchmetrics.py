"""Metrics of torchmetrics in an evaluation: the real objects, without Paceline knowing the package."""

from __future__ import annotations

import pytest
import torch
from tests.train.loop.test_evaluation import everywhere
from tests.train.loop.test_whole_set_metrics import LABELS, X, classifier, evaluated

from paceline.train.loop import worker_jobs
from paceline.train.settings.evaluation_config import EvaluationConfig

torchmetrics = pytest.importorskip("torchmetrics")


def outputs_of(given):
    [[outputs]] = everywhere(worker_jobs.predict, given, (1,))
    return outputs


def test_single_metrics_are_those_of_one_process_over_the_whole_set():
    given = classifier((X, LABELS))
    how = EvaluationConfig(
        metrics={
            "f1": torchmetrics.F1Score("multiclass", num_classes=2, average="macro"),
            "auroc": torchmetrics.AUROC("multiclass", num_classes=2),
            "calibration": torchmetrics.CalibrationError("multiclass", num_classes=2),
        }
    )
    found = evaluated(given, how)
    outputs = outputs_of(given)
    for name, metric in how.metrics.items():
        assert metric.update_count == 0, "the caller's object is left as it is"
        metric.update(outputs, LABELS)
        assert found[name] == pytest.approx(float(metric.compute()), rel=1e-6)


def test_a_collection_gives_its_names():
    both = torchmetrics.MetricCollection(
        {
            "precision": torchmetrics.Precision("multiclass", num_classes=2),
            "recall": torchmetrics.Recall("multiclass", num_classes=2),
        }
    )
    found = evaluated(classifier(), EvaluationConfig(metrics={"quality": both}, batch_size=4))
    assert {"quality/precision", "quality/recall"} < found.keys()


def test_one_that_gives_a_number_for_each_class_is_refused_by_name():
    each = torchmetrics.F1Score("multiclass", num_classes=2, average=None)
    with pytest.raises(Exception, match=r"the metric 'f1' gave a value of shape \(2,\)"):
        evaluated(classifier(), EvaluationConfig(metrics={"f1": each}))


def test_it_waits_for_no_other_rank_where_torch_distributed_is_initialized(tmp_path):
    """Only the first rank computes; a metric that synchronized would wait for ranks that never come."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        how = EvaluationConfig(metrics={"f1": torchmetrics.F1Score("multiclass", num_classes=2)})
        assert "f1" in evaluated(classifier(), how)
    finally:
        torch.distributed.destroy_process_group()
