"""Samples in memory: what a batch looks like, whose memory it is, and what is refused."""

from __future__ import annotations

import os
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.errors import UnavailableError, UsageError
from paceline.data.sources import ArraySource, Request, as_source, read

IDS = np.array([3, 0, 3, 7])
Pair = namedtuple("Pair", ["x", "y"])


def fetch(data: Any, ids: np.ndarray = IDS) -> Any:
    batch = as_source(data).fetch(ids)
    assert batch.count == len(ids)
    return batch.data


def test_a_tensor_gives_rows() -> None:
    data = torch.randn(10, 3)
    assert torch.equal(fetch(data), data[IDS])
    assert as_source(data).size == 10


def test_structures_are_kept() -> None:
    x, y = np.arange(20.0).reshape(10, 2), torch.arange(10)
    pair = fetch((x, y))
    assert type(pair) is tuple
    assert torch.equal(pair[0], torch.from_numpy(x[IDS]))
    assert torch.equal(pair[1], y[IDS])
    named = fetch(Pair(x, y))
    assert type(named) is Pair
    assert torch.equal(named.y, y[IDS])
    nested = fetch({"in": (x, {"deep": y}), "out": y})
    assert torch.equal(nested["in"][1]["deep"], y[IDS])
    assert list(nested) == ["in", "out"]


def test_a_batch_is_memory_of_its_own() -> None:
    data = torch.zeros(10, 2)
    fetch(data, np.arange(4)).add_(1)
    assert data.sum() == 0


def test_making_a_source_copies_nothing() -> None:
    array, tensor = np.zeros((10, 2)), torch.zeros(10)
    frame = pd.DataFrame({"a": np.arange(10), "b": np.arange(10.0)})
    source = as_source((array, tensor, frame))
    assert isinstance(source, ArraySource)
    addresses = [column.data_ptr() for column in source.columns if isinstance(column, Tensor)]
    assert addresses[:2] == [array.ctypes.data, tensor.data_ptr()]
    assert addresses[2:] == [frame[name].to_numpy().ctypes.data for name in ("a", "b")]


def test_pandas_columns_come_as_a_dict() -> None:
    frame = pd.DataFrame(
        {
            "n": np.arange(10),
            "x": np.linspace(0, 1, 10, dtype=np.float32),
            "flag": [True, False] * 5,
            "text": [f"t{i}" for i in range(10)],
            "maybe": pd.array(range(10), dtype="Int64"),
        },
        index=pd.Index(range(100, 110)),
    )
    batch = fetch(frame)
    assert {name: getattr(value, "dtype", list) for name, value in batch.items()} == {
        "n": torch.int64,
        "x": torch.float32,
        "flag": torch.bool,
        "text": list,
        "maybe": torch.int64,
    }
    # By place, not by the index's label.
    assert batch["n"].tolist() == batch["maybe"].tolist() == IDS.tolist()
    assert batch["text"] == ["t3", "t0", "t3", "t7"]
    matrix, labels = fetch((frame[["x"]].to_numpy(), frame["n"]))
    assert matrix.shape == (4, 1)
    assert labels.tolist() == IDS.tolist()


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "uint16", "uint32", "uint64", "float16", "complex64"]
)
def test_number_types(dtype: str) -> None:
    array = np.arange(20).reshape(10, 2).astype(dtype)
    assert np.array_equal(fetch(array).numpy(), array[IDS])
    assert np.array_equal(fetch(array[:, 1]).numpy(), array[IDS, 1])


def test_texts_and_fields_and_views() -> None:
    assert fetch(np.array([f"t{i}" for i in range(10)])) == ["t3", "t0", "t3", "t7"]
    record = np.array([(i, i / 2) for i in range(10)], dtype=[("a", "i4"), ("b", "f8")])
    batch = fetch(record)
    assert batch["a"].tolist() == IDS.tolist()
    assert batch["b"].tolist() == (IDS / 2).tolist()
    base = np.arange(40.0).reshape(10, 4)
    assert torch.equal(fetch(base[::-1, ::2]), torch.from_numpy(base[::-1, ::2][IDS].copy()))
    fixed = np.arange(10)
    fixed.flags.writeable = False
    assert fetch(fixed).tolist() == IDS.tolist()


def test_a_tensor_dataset_is_read_as_its_columns_and_looks_like_torchs_batches() -> None:
    dataset = TensorDataset(torch.randn(10, 2), torch.arange(10))
    for data in (dataset, DataLoader(dataset, batch_size=3, shuffle=True, num_workers=2)):
        source = as_source(data)
        assert isinstance(source, ArraySource)
        mine = source.fetch(np.arange(4)).data
        theirs = next(iter(DataLoader(dataset, batch_size=4)))
        assert type(mine) is type(theirs) is list
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_numbers_that_may_not_be_written_to() -> None:
    fixed = IDS.copy()
    fixed.flags.writeable = False
    assert fetch(torch.arange(10), fixed).tolist() == IDS.tolist()


def test_no_samples_asked_for() -> None:
    batch = as_source(torch.zeros(3)).fetch(np.empty(0, np.int64))
    assert (batch.data, batch.count) == (None, 0)


def test_reading_arrays_leaves_the_generators_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    batches = list(read(as_source(torch.arange(10)), [Request((1,), IDS), Request((2,), IDS[:1])]))
    assert [batch.data.tolist() for batch in batches] == [IDS.tolist(), [3]]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), r"data\[0\] has 3, data\[1\] has 4"),
        ({"a": np.zeros(3), "b": pd.Series([1])}, r"data\['a'\] has 3, data\['b'\] has 1"),
        (torch.tensor(1.0), "single number"),
        (np.array(1.0), "single number"),
        (torch.zeros(3, 3).to_sparse(), "layout"),
        (np.zeros(3, ">f8" if np.little_endian else "<f8"), "byte order"),
        (np.array(["2020"], "datetime64[D]"), "datetime64"),
        (np.ma.masked_array([1, 2], [True, False]), "masked"),
        (np.array([["a"]]), "flat list"),
        (pd.Series(pd.to_datetime(["2020-01-01"])), "datetime64"),
        (pd.Series(["a"], dtype="category"), "categorical"),
        (pd.Series([1, None], dtype="Int64"), "1 missing"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "more than one column named a"),
        ({}, "empty dict"),
    ],
)
def test_what_cannot_be_a_column(data: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        as_source(data)
    assert caught.value.remedy


def test_a_sample_that_does_not_exist_is_named() -> None:
    for wrong in (10, -1):
        with pytest.raises(UsageError, match=rf"sample {wrong} does not exist"):
            as_source(np.array(["text"] * 10)).fetch(np.array([0, wrong]))
        with pytest.raises(UsageError, match=rf"sample {wrong} does not exist: the data has 10"):
            as_source((torch.zeros(10), torch.zeros(10))).fetch(np.array([0, wrong]))


def _private_bytes_of_the_data(ctx: Any, source: ArraySource) -> tuple[float, int, int, str]:
    """Reads every row, then asks the kernel about the mapping that holds the column."""
    total = sum(float(batch.data.sum()) for batch in read(source, _all_rows(source)))
    ctx.barrier()
    column = source.columns[0]
    assert isinstance(column, Tensor)
    wanted, found = column.data_ptr(), {}
    inside, name = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\S+)\s*(.*)", line):
            inside = int(header[1], 16) <= wanted < int(header[2], 16)
            name = f"{header[3]} {header[4]}" if inside else name
        elif inside:
            key, _, rest = line.partition(":")
            if key in ("Rss", "Private_Dirty", "Anonymous"):
                found[key] = int(rest.split()[0]) * 1024
    ctx.barrier()
    return total, found["Rss"], found["Private_Dirty"] + found["Anonymous"], name


def _all_rows(source: ArraySource) -> list[Request]:
    return [Request((0,), np.arange(i, min(i + 512, source.size))) for i in range(0, source.size, 512)]


def test_workers_share_one_copy() -> None:
    data = np.ones((4096, 512), np.float64)
    results = paceline.spawn(_private_bytes_of_the_data, as_source(data), workers=3)
    for total, resident, private, _ in results:
        assert total == data.size
        assert resident >= data.nbytes
        assert private < 1 << 20
    # Device and inode: all of them look at the same memory file.
    assert len({name for *_, name in results}) == 1


def test_workers_map_a_mapped_file_again(tmp_path: Path) -> None:
    path = tmp_path / "big.npy"
    np.save(path, np.arange(4096 * 512, dtype=np.float64).reshape(4096, 512))
    part = np.load(path, mmap_mode="r")[1024:]
    for _, _, private, name in paceline.spawn(_private_bytes_of_the_data, as_source(part), workers=2):
        assert name.endswith(str(path))
        assert private < 1 << 20


def _values(ctx: Any, source: ArraySource) -> list[list[Any]]:
    return [part.tolist() if isinstance(part, Tensor) else part for part in source.fetch(IDS).data.values()]


def test_views_and_texts_travel_as_what_they_are() -> None:
    wide = np.arange(400.0).reshape(10, 40)
    frame = {
        "view": wide[:, 3],
        "tensor": torch.from_numpy(wide).t()[5],
        "text": np.array(list("abcdefghij")),
    }
    expected = [wide[IDS, 3].tolist(), wide[IDS, 5].tolist(), ["d", "a", "d", "h"]]
    assert paceline.spawn(_values, as_source(frame), workers=2) == [expected] * 2


def test_a_mapped_file_that_is_gone_is_named(tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "gone.npy"
    np.save(path, np.arange(10))
    travelled = pickle.dumps(as_source(np.load(path, mmap_mode="r")))
    os.remove(path)
    with pytest.raises(UnavailableError, match=r"gone\.npy"):
        pickle.loads(travelled)


def _sums(ctx: Any, source: ArraySource) -> list[str]:
    return [str(part.dtype) + str(part.tolist()) for part in source.fetch(IDS).data]


def test_every_dtype_travels() -> None:
    values = torch.arange(10)
    data = tuple(
        values.to(dtype)
        for dtype in (torch.bfloat16, torch.bool, torch.uint16, torch.complex64, torch.float64)
    )
    here = _sums(None, array_of(data))
    assert paceline.spawn(_sums, as_source(data), workers=2) == [here, here]


def array_of(data: Any) -> ArraySource:
    source = as_source(data)
    assert isinstance(source, ArraySource)
    return source
