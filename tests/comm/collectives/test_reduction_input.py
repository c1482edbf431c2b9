"""What goes in comes out: kinds of data, layouts, out=, and inputs that stay as they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.comm.ranks import LARGE, refused_then_works, sha, wide_range
from torch import Tensor

from paceline.comm.context import DistributedContext
from paceline.comm.transport.shm import window
from paceline.testing.thread_transport import run_ranks

ALGORITHMS = ("direct", "ring", "tree", "hierarchical", "canonical")


@pytest.fixture(params=[0.0, math.inf], ids=["by slots", "in place"], autouse=True)
def way(request, monkeypatch):
    """Take both ways of a large reduction, whichever is faster on this machine at this moment."""
    monkeypatch.setattr(window, "_WORTH", request.param)


def both(fn: Any) -> Any:
    """Runs on two ranks that must agree, and returns what they agree on."""
    first, second = run_ranks(2, fn)
    assert repr(first) == repr(second)
    return first


@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestKinds:
    def test_a_list_of_tensors(self, algorithm):
        def one(ctx: DistributedContext) -> Any:
            parts = [torch.full((2, 3), 1.0), torch.full((), 2.0), torch.empty(0), torch.full((4,), 3.0)]
            return ctx.all_reduce(parts, "sum", algorithm)

        result = both(one)
        assert isinstance(result, list)
        assert [part.shape for part in result] == [(2, 3), (), (0,), (4,)]
        assert [part.unique().tolist() for part in result] == [[2.0], [4.0], [], [6.0]]

    def test_a_tuple_of_tensors(self, algorithm):
        result = both(lambda ctx: ctx.all_reduce((torch.ones(2), torch.ones(1)), "sum", algorithm))
        assert isinstance(result, tuple)
        assert [part.tolist() for part in result] == [[2.0, 2.0], [2.0]]

    @pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "u1", "?", "c8", "f2"])
    def test_an_array(self, algorithm, dtype):
        def one(ctx: DistributedContext) -> Any:
            return ctx.all_reduce(np.arange(6).astype(dtype).reshape(2, 3), "sum", algorithm)

        result = both(one)
        assert isinstance(result, np.ndarray)
        assert result.dtype == np.dtype(dtype)
        expected = np.arange(6).astype(dtype).reshape(2, 3)
        assert np.array_equal(result, expected + expected)

    def test_numbers(self, algorithm):
        assert both(lambda ctx: ctx.all_reduce([0.1, 2.5], "sum", algorithm)) == [0.1 + 0.1, 5.0]
        assert both(lambda ctx: ctx.all_reduce((1, 2, 3), "sum", algorithm)) == (2, 4, 6)
        assert both(lambda ctx: ctx.all_reduce([1, 0.5], "sum", algorithm)) == [2.0, 1.0]
        assert both(lambda ctx: ctx.all_reduce([], "sum", algorithm)) == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.5, 5.0),
        (3, 6),
        (True, True),
        (1 + 2j, 2 + 4j),
        ([True, False], [True, False]),
        ([1j, 1.0], [2j, 2 + 0j]),
    ],
)
def test_python_numbers_keep_their_type(value, expected):
    result = both(lambda ctx: ctx.all_reduce(value))
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize("value", [np.float32(1.5), np.float64(2.5), np.int16(3), np.bool_(True)])
def test_numpy_scalars_keep_their_type(value):
    result = both(lambda ctx: ctx.all_reduce(value))
    assert type(result) is type(value)
    assert result == value + value


def test_arrays_in_any_memory():
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    for array in (
        frozen,
        np.arange(8.0)[::2],
        np.arange(8.0)[::-1],
        np.arange(6.0).reshape(2, 3).T,
        np.array(7.0),
    ):
        before = array.copy()
        result = both(lambda ctx, array=array: ctx.all_reduce(array))
        assert np.array_equal(result, before + before)
        assert np.array_equal(array, before)
        assert result.shape == array.shape


@pytest.mark.parametrize("size", [12, LARGE])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_non_contiguous_tensors(algorithm, size):
    layouts = {
        "transposed": lambda base: base.view(3, -1).t(),
        "strided": lambda base: base[::2],
        "expanded": lambda base: base[:5, None].expand(5, 7),
        "channels last": lambda base: (
            base[: size // 12 * 12].view(1, 3, 2, -1).to(memory_format=torch.channels_last)
        ),
        "offset": lambda base: base[1:],
    }

    def one(ctx: DistributedContext) -> dict[str, tuple[Tensor, Tensor]]:
        results = {}
        for name, layout in layouts.items():
            data = layout(wide_range(ctx.rank, size // 3 * 3))
            before = data.clone()
            results[name] = (before, ctx.all_reduce(data, "sum", algorithm))
            assert torch.equal(data, before)
        return results

    ranks = run_ranks(2, one)
    for name in layouts:
        (first, a), (second, b) = ranks[0][name], ranks[1][name]
        assert a.shape == first.shape
        assert torch.equal(a, first + second), name
        assert sha(a) == sha(b)


@pytest.mark.parametrize("size", [12, LARGE])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("shared", [False, True])
def test_conjugated_and_negated_views(algorithm, size, shared):
    """Their memory holds something else than their values."""

    def one(ctx: DistributedContext) -> tuple[Tensor, Tensor]:
        memory = (
            ctx.empty(size, dtype=torch.complex64) if shared else torch.empty(size, dtype=torch.complex64)
        )
        data = memory.fill_(1 + 2j).conj()
        return ctx.all_reduce(data, "sum", algorithm), ctx.all_reduce(data.imag, "sum", algorithm)

    for conjugated, negated in run_ranks(2, one):
        assert torch.equal(conjugated, torch.full((size,), 2 - 4j, dtype=torch.complex64))
        assert torch.equal(negated, torch.full((size,), -4.0))


@pytest.mark.parametrize("size", [12, LARGE])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_results_in_conjugated_and_negated_views(algorithm, size):
    """What stands in their memory is not the result, but what reads as the result."""

    def one(ctx: DistributedContext) -> tuple[Tensor, Tensor]:
        data = torch.full((size,), 1 + 2j, dtype=torch.complex64)
        conjugated, negated = torch.empty_like(data).conj(), torch.empty_like(data).conj().imag
        assert ctx.all_reduce(data, "sum", algorithm, out=conjugated) is conjugated
        ctx.all_reduce(data.imag, "sum", algorithm, out=negated)
        ctx.all_reduce(conjugated, "sum", algorithm, out=conjugated)
        return conjugated, negated

    for conjugated, negated in run_ranks(2, one):
        assert conjugated.is_conj()
        assert negated.is_neg()
        assert torch.equal(conjugated, torch.full((size,), 4 + 8j, dtype=torch.complex64))
        assert torch.equal(negated, torch.full((size,), 4.0))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [5, LARGE])
class TestOut:
    def test_in_place(self, algorithm, size):
        def one(ctx: DistributedContext) -> Any:
            data = wide_range(ctx.rank, size)
            assert ctx.all_reduce(data, "sum", algorithm, out=data) is data
            return data

        first, second = run_ranks(2, one)
        assert torch.equal(first, wide_range(0, size) + wide_range(1, size))
        assert torch.equal(first, second)

    def test_into_another_tensor(self, algorithm, size):
        def one(ctx: DistributedContext) -> Any:
            data, out = wide_range(ctx.rank, size), torch.full((size,), -1.0)
            assert ctx.all_reduce(data, "sum", algorithm, out=out) is out
            assert torch.equal(data, wide_range(ctx.rank, size))
            return out

        for out in run_ranks(2, one):
            assert torch.equal(out, wide_range(0, size) + wide_range(1, size))

    def test_into_memory_with_gaps(self, algorithm, size):
        def one(ctx: DistributedContext) -> Tensor:
            store = torch.full((2 * size,), -1.0)
            data = torch.full((2 * size,), float(ctx.rank))[::2]
            ctx.all_reduce(data, "sum", algorithm, out=store[::2])
            ctx.all_reduce(data, "sum", algorithm, out=data)
            assert torch.equal(data, store[::2])
            return store

        for store in run_ranks(2, one):
            assert torch.equal(store[::2], torch.ones(size))
            assert torch.equal(store[1::2], torch.full((size,), -1.0))

    def test_lists(self, algorithm, size):
        def one(ctx: DistributedContext) -> list[Tensor]:
            data = [torch.ones(size), torch.full((2, 2), 3.0).t()]
            out = [torch.empty(size), torch.empty(2, 2)]
            assert ctx.all_reduce(data, "sum", algorithm, out=out) is out
            assert ctx.all_reduce(data, "sum", algorithm, out=data) is data
            return [*out, *data]

        for results in run_ranks(2, one):
            for big, small in (results[:2], results[2:]):
                assert torch.equal(big, torch.full((size,), 2.0))
                assert torch.equal(small, torch.full((2, 2), 6.0))


def test_parameters_and_tensors_with_gradients():
    def one(ctx: DistributedContext) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        total = ctx.all_reduce(weight)
        assert not total.requires_grad
        assert total.tolist() == [2.0, 2.0, 2.0]
        scaled = weight * 2
        assert ctx.all_reduce(scaled).tolist() == [4.0, 4.0, 4.0]
        assert ctx.all_reduce(weight, out=weight) is weight
        assert weight.tolist() == [2.0, 2.0, 2.0]
        assert weight.requires_grad

    run_ranks(2, one)


def test_results_are_new_memory_each_time():
    def one(ctx: DistributedContext) -> None:
        data = torch.ones(4)
        first = ctx.all_reduce(data)
        second = ctx.all_reduce(data)
        first += 100
        assert second.tolist() == [2.0] * 4
        assert data.tolist() == [1.0] * 4

    run_ranks(2, one)


@pytest.mark.parametrize(
    "out",
    [
        torch.empty(4),
        torch.empty(3, dtype=torch.float64),
        torch.empty(3, 1),
        [torch.empty(3), torch.empty(3)],
        [1.0, 2.0, 3.0],
        np.empty(3, dtype="f4"),
        "here",
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.ones(1).expand(3),
    ],
    ids=[
        "length",
        "dtype",
        "shape",
        "list",
        "numbers",
        "array",
        "text",
        "device",
        "sparse",
        "one element for all",
    ],
)
def test_a_wrong_out_is_refused(out):
    refused_then_works(lambda ctx: ctx.all_reduce(torch.ones(3), out=out))


def test_in_place_into_elements_that_share_memory_is_refused():
    data = torch.ones(1).expand(3)
    refused_then_works(lambda ctx: ctx.all_reduce(data, out=data))


UNFIT: dict[str, Callable[[], Any]] = {
    "text": lambda: "text",
    "bytes": lambda: b"bytes",
    "nothing": lambda: None,
    "a dict": lambda: {"a": torch.ones(1)},
    "texts": lambda: ["a", "b"],
    "a gap": lambda: [1.0, None],
    "tensors and numbers": lambda: [torch.ones(1), 1.0],
    "mixed dtypes": lambda: [torch.ones(1), torch.ones(1, dtype=torch.int64)],
    "large numbers": lambda: [1 << 70],
    "a large number": lambda: 1 << 70,
    "an array of texts": lambda: np.array(["a"]),
    "an array of objects": lambda: np.array([None]),
    "an array of foreign byte order": lambda: np.arange(3, dtype=">f4"),
    "an array of dates": lambda: np.array(["2020-01-01"], dtype="M8[D]"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "on no device": lambda: torch.ones(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
}


@pytest.mark.parametrize("what", list(UNFIT))
@pytest.mark.filterwarnings("ignore")  # torch warns of its own features
def test_what_cannot_be_reduced_is_refused_on_the_rank_that_passed_it(what):
    data = UNFIT[what]()
    refused_then_works(lambda ctx: ctx.all_reduce(data))
    refused_then_works(lambda ctx: ctx.reduce(data))
    refused_then_works(lambda ctx: ctx.reduce_scatter([data, data]))


@pytest.mark.parametrize(
    ("data", "op"),
    [
        (torch.ones(3, dtype=torch.int64), "average"),
        (torch.ones(3, dtype=torch.bool), "average"),
        (torch.ones(3, dtype=torch.complex64), "min"),
        (torch.ones(3, dtype=torch.complex64), "max"),
        (torch.ones(3, dtype=torch.float8_e4m3fn), "sum"),
        ([1, 2], "average"),
        (3, "average"),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
def test_operations_that_do_not_suit_the_dtype_are_refused(data, op, algorithm):
    refused_then_works(lambda ctx: ctx.all_reduce(data, op, algorithm))
