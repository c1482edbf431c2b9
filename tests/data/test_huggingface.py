"""Hugging Face datasets, the real package: tables, transforms, streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

import paceline
from paceline.core.errors import UsageError
from paceline.data.sources import MapSource, Stream, as_source

datasets = pytest.importorskip("datasets")

IDS = np.array([5, 1, 9])


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    # Its progress bars start a thread that never ends.
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


def table(count: int = 12) -> Any:
    return datasets.Dataset.from_dict(
        {
            "number": list(range(count)),
            "vector": [[float(i), i / 2] for i in range(count)],
            "text": [f"t{i}" for i in range(count)],
        }
    )


def check(batch: Any) -> None:
    assert batch["number"].tolist() == [5, 1, 9]
    assert torch.equal(batch["vector"], torch.tensor([[5, 2.5], [1, 0.5], [9, 4.5]]))
    assert batch["text"] == ["t5", "t1", "t9"]


@pytest.mark.parametrize("form", [None, "torch", "numpy", "pandas", "arrow"])
def test_a_table_gives_whole_columns(form: str | None) -> None:
    source = as_source(table().with_format(form) if form else table())
    assert isinstance(source, MapSource)
    assert source.size == 12
    batch = source.fetch(IDS)
    assert batch.count == 3
    check(batch.data)


def test_chosen_columns_and_rows_are_respected() -> None:
    chosen = table().with_format("numpy", columns=["number"])
    assert list(as_source(chosen).fetch(IDS).data) == ["number"]
    part = table().select([9, 5, 1]).filter(lambda row: row["number"] != 5)
    assert as_source(part).fetch(np.array([1, 0])).data["number"].tolist() == [1, 9]


def test_a_transform_of_the_users_is_applied() -> None:
    def double(rows: dict[str, Any]) -> dict[str, Any]:
        return {"twice": [2 * number for number in rows["number"]]}

    assert as_source(table().with_transform(double)).fetch(IDS).data["twice"].tolist() == [10, 2, 18]


def test_a_loader_over_a_table_gives_what_torch_would() -> None:
    loader = torch.utils.data.DataLoader(table().with_format("torch"), batch_size=4)
    check(as_source(loader).fetch(IDS).data)


def test_rows_of_different_lengths_name_the_column() -> None:
    ragged = datasets.Dataset.from_dict({"tokens": [[1], [1, 2], [3]]})
    with pytest.raises(UsageError, match="column 'tokens' differ in shape") as caught:
        as_source(ragged).fetch(np.array([0, 1]))
    assert "collate_fn" in caught.value.remedy
    missing = datasets.Dataset.from_dict({"text": ["a", None]})
    with pytest.raises(UsageError, match="column 'text' has missing values"):
        as_source(missing).fetch(np.array([0, 1]))


def test_several_datasets_are_refused_with_their_names() -> None:
    with pytest.raises(UsageError, match="train, test") as caught:
        as_source(datasets.DatasetDict({"train": table(), "test": table()}))
    assert "data['train']" in caught.value.remedy


def _columns(ctx: Any, source: MapSource) -> list[int]:
    numbers: list[int] = source.fetch(IDS).data["number"].tolist()
    return numbers


def test_a_table_travels_to_workers() -> None:
    assert paceline.spawn(_columns, as_source(table()), workers=2) == [[5, 1, 9]] * 2


def numbers(stream: Stream, count: int) -> list[int]:
    return [int(row["number"]) for row in stream.take(count)]


def test_a_stream_resumes_at_once(caplog: pytest.LogCaptureFixture) -> None:
    def fresh() -> Stream:
        stream = as_source(table(40).to_iterable_dataset(num_shards=4))
        assert isinstance(stream, Stream)
        return stream

    first = fresh()
    first.start(1, seed=3)
    batch = first.batch(first.take(3))
    assert batch.data["vector"].shape == (3, 2)
    assert numbers(first, 14) == list(range(3, 17))
    second = fresh()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert numbers(second, 40) == list(range(17, 40))
    assert "samples again" not in caplog.text
    for epoch in (1, 2):
        # A pass that was left halfway, and a state that was loaded, are no part of the next pass.
        again = fresh()
        again.start(epoch, seed=3)
        second.start(epoch, seed=3)
        assert numbers(second, 15) == numbers(again, 15)


def test_a_shuffle_buffer_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fresh() -> Stream:
        stream = as_source(table(40).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=8))
        assert isinstance(stream, Stream)
        return stream

    whole = fresh()
    whole.start(1, seed=3)
    expected = numbers(whole, 40)
    assert sorted(expected) == list(range(40))
    first = fresh()
    first.start(1, seed=3)
    first.take(17)
    second = fresh()
    second.load_state_dict(first.state_dict())
    assert numbers(second, 40) == expected[17:]
    assert "reading 17 samples again" in caplog.text
