"""What workers of TensorFlow that train in step agree on before they do, data that never ends, and names of
accuracies: without TensorFlow, whose collectives and datasets are simple objects here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.frontends.framework_trainers.framework_stand_ins import run_config, tensorflow_loop

from paceline.core.errors import UsageError
from paceline.frontends.framework_trainers.strategy_group import StrategyGroup
from paceline.frontends.framework_trainers.tensorflow_data import EpochDataset, sizes_of
from paceline.frontends.framework_trainers.tensorflow_loop import with_accuracy


def agree_with(
    mine: Mapping[str, int | None], theirs: Mapping[str, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let worker 0 and another worker agree on their numbers."""

    def other(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        added = np.zeros(rows.shape, np.int64)
        added[1] = [-1 if one is None else one for one in theirs.values()]
        added += rows
        return added

    group = StrategyGroup(None, None, 0, 2)
    monkeypatch.setattr(group, "_sum", other)
    group.agree(mine)


def test_workers_whose_numbers_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(batch=16, steps=4)
    with_data: dict[str, int | None] = {"epochs": 2, **sizes_of(given, "validation")}  # type: ignore[arg-type]
    agree_with(with_data, with_data, monkeypatch)
    with pytest.raises(UsageError, match="epochs is 2 on worker 0 and 3 on worker 1: every worker"):
        agree_with(with_data, {**with_data, "epochs": 3}, monkeypatch)
    with pytest.raises(
        UsageError, match="datasets for validation is 1 on worker 0 and 0 on worker 1"
    ) as found:
        agree_with(with_data, {"epochs": 2, **sizes_of(None, "validation")}, monkeypatch)
    assert "validation data to all of them or to none" in found.value.remedy
    with pytest.raises(UsageError, match="batches for validation is 4 on worker 0 and None on worker 1"):
        agree_with(with_data, {**with_data, "the number of batches for validation": None}, monkeypatch)


@pytest.mark.parametrize("limit", [None, 5])
def test_a_loop_agrees_on_its_length_and_on_its_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    agreed: dict[str, int | None] = {}
    monkeypatch.setattr(StrategyGroup, "agree", lambda self, numbers: agreed.update(numbers))
    tensorflow_loop(run_config(tmp_path / "run", epochs=2, max_steps=limit), 4).run()
    assert (agreed["epochs"], agreed["max_steps"]) == (2, limit)
    assert agreed["the number of datasets for validation"] == 1
    assert agreed["the size of a batch for validation"] == 2


class Shape(tuple[int, ...]):
    """A shape of TensorFlow's."""

    @property
    def rank(self) -> int:
        return len(self)


class Dataset:
    """A tf.data.Dataset with that cardinality and batches of 8 samples."""

    def __init__(self, cardinality: int) -> None:
        self._cardinality = cardinality

    def cardinality(self) -> int:
        return self._cardinality

    def __iter__(self) -> Iterator[Any]:
        return iter([SimpleNamespace(shape=Shape((8, 2)))])


@pytest.mark.parametrize(("cardinality", "steps"), [(4, 4), (-2, None), (-1, None)])
def test_data_that_repeats_without_end_is_refused(cardinality: int, steps: int | None) -> None:
    tf = SimpleNamespace(
        data=SimpleNamespace(Dataset=Dataset, INFINITE_CARDINALITY=-1),
        nest=SimpleNamespace(flatten=lambda part: [part]),
    )
    job: Any = SimpleNamespace(tf=tf, coordinator=None, replicas=1)
    data = EpochDataset(job, Dataset(cardinality), "the validation data")
    assert data.steps == steps
    if cardinality != -1:
        data.refuse_endless()
        return
    with pytest.raises(UsageError, match="the validation data repeats without end") as found:
        data.refuse_endless("; or more")
    assert found.value.remedy == "use dataset.take(BATCHES), or leave repeat() out; or more"


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"accuracy": 0.5, "binary_accuracy": 0.25}, 0.5),
        ({"sparse_categorical_accuracy": 0.5, "precision": 1.0}, 0.5),
        ({"a_accuracy": 0.5}, 0.5),
        ({"acc": 0.5}, 0.5),
        ({"categorical_accuracy": 0.5, "top_k_categorical_accuracy": 0.9}, 0.5),
        ({"a_accuracy": 0.5, "b_accuracy": 0.25}, None),
        ({"top_k_categorical_accuracy": 0.9}, None),
        ({"precision": 1.0}, None),
    ],
)
def test_the_only_accuracy_is_the_accuracy(metrics: dict[str, float], expected: float | None) -> None:
    found = with_accuracy(metrics)
    assert found.get("accuracy") == expected
    assert metrics.items() <= found.items()
