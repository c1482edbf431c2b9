"""Checked shards that are whole: what is written is what is read, from any place and by any worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

import paceline
from paceline.core.errors import UsageError
from paceline.data.checked import CheckedShards, ShardManifest, verify, write_shards
from paceline.data.sources import MapSource, Request, as_source, read


def samples(count: int = 10) -> list[Any]:
    return [
        (
            torch.full((3, 2), float(i)),
            {"label": i, "text": f"t{i}", "raw": bytes([i]), "array": np.arange(i)},
        )
        for i in range(count)
    ]


def same(left: Any, right: Any) -> bool:
    return bool(
        torch.equal(left[0], right[0])
        and {k: v for k, v in left[1].items() if k != "array"}
        == {k: v for k, v in right[1].items() if k != "array"}
        and np.array_equal(left[1]["array"], right[1]["array"])
        and left[1]["array"].dtype == right[1]["array"].dtype
    )


@pytest.mark.parametrize("per_shard", [1, 3, 5, 10, 11])
def test_what_is_written_is_what_is_read(tmp_path: Path, per_shard: int) -> None:
    written = samples()
    manifest = write_shards(written, tmp_path, samples_per_shard=per_shard)
    shards = CheckedShards(tmp_path)
    assert len(shards) == manifest.samples == 10
    assert shards.manifest == manifest
    assert all(same(shards[i], written[i]) for i in range(10))
    assert same(shards[-1], written[9])
    assert verify(tmp_path) == []
    assert [shard.samples for shard in manifest.shards] == [
        min(per_shard, 10 - start) for start in range(0, 10, per_shard)
    ]
    with pytest.raises(IndexError):
        shards[10]


def test_a_sample_may_be_changed_without_changing_the_data(tmp_path: Path) -> None:
    write_shards([torch.zeros(100)], tmp_path)
    shards = CheckedShards(tmp_path)
    shards[0].add_(1)
    assert shards[0].sum() == 0


def test_kinds_of_data(tmp_path: Path) -> None:
    class Count(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            yield from range(7)

    frame = pd.DataFrame({"x": np.arange(7.0), "name": list("abcdefg")})
    pair = (torch.arange(14).reshape(7, 2), np.arange(7))
    listed: Any = samples(10)
    kinds = (Count(), frame, pair, Subset(listed, range(7)), DataLoader(listed[:7]), range(7))
    for place, data in enumerate(kinds):
        assert write_shards(data, tmp_path / str(place), samples_per_shard=4).samples == 7
    assert [CheckedShards(tmp_path / "0")[i] for i in range(7)] == list(range(7))
    row = CheckedShards(tmp_path / "1")[3]
    assert (row["x"].item(), row["name"]) == (3.0, "d")
    assert CheckedShards(tmp_path / "2")[3][0].tolist() == [6, 7]
    assert len(CheckedShards(tmp_path / "5")) == 7


def test_scalars_and_odd_dtypes(tmp_path: Path) -> None:
    written = [
        torch.tensor(1.5, dtype=torch.bfloat16),
        np.float32(2),
        3,
        "four",
        None,
        torch.empty(0, 3),
        True,
    ]
    write_shards(written, tmp_path)
    read_back = [CheckedShards(tmp_path)[i] for i in range(7)]
    assert read_back[0].dtype == torch.bfloat16
    assert read_back[0].item() == 1.5
    assert read_back[1:5] == [np.float32(2), 3, "four", None]
    assert read_back[5].shape == (0, 3)
    assert read_back[6] is True


def test_nothing_at_all(tmp_path: Path) -> None:
    assert write_shards([], tmp_path).samples == 0
    assert len(CheckedShards(tmp_path)) == 0
    assert verify(tmp_path) == []


def test_urls(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    try:
        for url in ("memory://here/data", f"file://{tmp_path}/data", str(tmp_path / "plain")):
            write_shards(samples(), url, samples_per_shard=4)
            shards = CheckedShards(url)
            assert all(same(shards[i], sample) for i, sample in enumerate(samples()))
            assert verify(url) == []
        assert (tmp_path / "data" / "manifest.json").exists()
    finally:
        memory.rm("/here", recursive=True)
    with pytest.raises(UsageError, match="nowhere"):
        CheckedShards("nowhere://x")
    with pytest.raises(UsageError, match="has no name"):
        CheckedShards("")


def test_a_full_folder_is_refused_and_an_unfinished_one_is_not(tmp_path: Path) -> None:
    class Dies(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            if number == 6:
                raise OSError("disk of the source")
            return super().__getitem__(number)

    with pytest.raises(UsageError, match=r"sample 6 of .*Dies"):
        write_shards(Dies(samples()), tmp_path, samples_per_shard=4)
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.raises(paceline.PacelineError, match="not a checked dataset, or writing it has not ended"):
        CheckedShards(tmp_path)
    write_shards(samples(), tmp_path, samples_per_shard=4)
    with pytest.raises(UsageError, match="already holds"):
        write_shards(samples(), tmp_path)


def test_a_sample_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"sample 1 .*cannot be written"):
        write_shards([{"a": 1}, {"a": object()}], tmp_path)
    with pytest.raises(UsageError, match="samples_per_shard"):
        write_shards([], tmp_path, samples_per_shard=0)


def test_the_manifest_round_trips_and_says_what_it_is(tmp_path: Path) -> None:
    manifest = write_shards(samples(), tmp_path, samples_per_shard=4)
    text = (tmp_path / "manifest.json").read_bytes()
    assert ShardManifest.from_json(text) == manifest
    assert json.loads(text)["format"] == "paceline-shards"
    assert [manifest.locate(sample) for sample in (0, 3, 4, 9)] == [(0, 0), (0, 3), (1, 0), (2, 1)]


def _labels(ctx: Any, *sources: MapSource) -> list[list[int]]:
    requests = [Request((0,), np.array([9, ctx.rank])), Request((1,), np.array([4]))]
    return [batch.data.tolist() for source in sources for batch in read(source, requests)]


def test_ranks_and_their_loaders_read_it(tmp_path: Path) -> None:
    write_shards(range(10), tmp_path, samples_per_shard=4)
    shards = CheckedShards(tmp_path)
    sources = (as_source(shards), as_source(DataLoader(shards, num_workers=1)))
    assert paceline.spawn(_labels, *sources, workers=2) == [[[9, 0], [4]] * 2, [[9, 1], [4]] * 2]
