"""Giving up: patience, minimum gains, both directions, NaN and saved states."""

from __future__ import annotations

import json
import math

import pytest

from paceline.core.errors import UsageError
from paceline.train.settings.schedule import EarlyStopper
from paceline.train.settings.train_config import EarlyStopping


def evaluations_until_stop(values, **settings):
    stopper = EarlyStopper(EarlyStopping(**settings))
    for index, value in enumerate(values):
        reason = stopper.observe({"loss": value, "accuracy": value})
        if reason:
            return index, reason
    return None, None


def test_patience_counts_evaluations_without_gain():
    assert evaluations_until_stop([3.0, 2.0, 2.5, 2.0, 1.0, 1.0, 1.0, 0.0], patience=2) == (
        3,
        "early stopping: loss was not better than 2 in 2 evaluations",
    )
    assert evaluations_until_stop([3.0, 2.0, 1.0], patience=1) == (None, None)


def test_a_gain_must_exceed_min_delta_and_may_go_up():
    assert evaluations_until_stop([1.0, 0.95, 0.9], patience=2, min_delta=0.1)[0] == 2
    assert evaluations_until_stop([0.5, 0.7, 0.6], metric="accuracy", mode="max", patience=1)[0] == 2


def test_nan_is_never_a_gain_nor_the_best():
    assert evaluations_until_stop([math.nan, 5.0, 4.0, math.nan], patience=2) == (None, None)
    assert "not better than a number" in evaluations_until_stop([math.nan, math.nan], patience=2)[1]


def test_the_state_goes_through_json():
    first, second = (EarlyStopper(EarlyStopping(patience=2)) for _ in range(2))
    first.observe({"loss": 1.0})
    first.observe({"loss": 2.0})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.observe({"loss": 2.0})
    fresh = EarlyStopper(EarlyStopping())
    fresh.load_state_dict(EarlyStopper(EarlyStopping()).state_dict())
    assert fresh.observe({"loss": 9.0}) is None


def test_a_metric_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(UsageError, match="watches 'accuracy', and the evaluation has f1, loss"):
        EarlyStopper(EarlyStopping(metric="accuracy", mode="max")).observe({"loss": 1.0, "f1": 0.5})
