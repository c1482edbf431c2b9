"""Wrong settings are refused at once, with what was given, what is allowed and what to write instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.comm.compression import PowerSGD, cast_gradients, quantize_gradients, sparsify_gradients
from paceline.core.errors import UsageError


def test_defaults_and_names() -> None:
    assert quantize_gradients().name == "int8"
    assert quantize_gradients(num_bits=4).name == "int4"
    assert quantize_gradients(8, block=64).name == "int8b64"
    assert sparsify_gradients().name == "topk0.99"
    assert sparsify_gradients(np.float64(0.9)).name == "topk0.9"
    assert sparsify_gradients(0).name == "topk0.0"
    assert cast_gradients().name == "fp16"
    assert cast_gradients(dtype="bf16").name == "bf16"
    assert PowerSGD().name == "powersgd2"
    assert repr(quantize_gradients()) == "Compression(int8)"


@pytest.mark.parametrize("bits", [5, 0, -8, 16, 8.0, "8", None, True])
def test_num_bits(bits: Any) -> None:
    with pytest.raises(UsageError, match=rf"num_bits={bits!r}; allowed are 8 and 4"):
        quantize_gradients(bits)


@pytest.mark.parametrize("block", [0, -2, 1, 3, 2.5, "256", None])
def test_block(block: Any) -> None:
    with pytest.raises(UsageError, match=rf"block={block!r}; allowed are even integers from 2"):
        quantize_gradients(8, block=block)


@pytest.mark.parametrize("sparsity", [1.0, 1, -0.1, 99, float("nan"), "0.99", None, True])
def test_sparsity(sparsity: Any) -> None:
    with pytest.raises(
        UsageError, match=rf"sparsity={sparsity!r}; allowed are numbers from 0 up to, but not"
    ):
        sparsify_gradients(sparsity)


@pytest.mark.parametrize("dtype", ["fp32", "", 16, None])
def test_dtype(dtype: Any) -> None:
    with pytest.raises(UsageError, match=rf"cast to {dtype!r}; allowed are 'fp16', 'bf16'"):
        cast_gradients(dtype)


@pytest.mark.parametrize("rank", [0, -1, 1.5, "2"])
def test_rank(rank: Any) -> None:
    with pytest.raises(UsageError, match=rf"rank={rank!r}; allowed are integers from 1"):
        PowerSGD(rank)


@pytest.mark.parametrize("rate", [0.5, "2", True])
def test_min_compression(rate: Any) -> None:
    with pytest.raises(UsageError, match=rf"min_compression={rate!r}; allowed are numbers from 1"):
        PowerSGD(min_compression=rate)


GRADIENTS = torch.linspace(-1.0, 1.0, 600).reshape(20, 30)


@pytest.mark.parametrize(
    ("made", "nbytes"),
    [
        (quantize_gradients(GRADIENTS, num_bits=8), 600 + 3 * 4),
        (quantize_gradients(GRADIENTS, 4), 300 + 3 * 4),
        (sparsify_gradients(GRADIENTS, sparsity=0.99), 6 * 8),
        (cast_gradients(GRADIENTS, dtype="bf16"), 1200),
    ],
    ids=["8 bits", "4 bits", "top-k", "bf16"],
)
def test_gradients_are_compressed_as_they_would_travel(made: Any, nbytes: int) -> None:
    assert made.nbytes == nbytes
    assert made.original_nbytes == 2400
    back = made.decompress()
    assert back.shape == GRADIENTS.shape
    assert (back - GRADIENTS).abs().max() <= 1.0
    assert made.compress(2 * GRADIENTS[:3]).decompress().shape == (3, 30)


@pytest.mark.parametrize(
    "data",
    [
        np.linspace(0.0, 1.0, 12).reshape(3, 4),
        [torch.zeros(3), torch.ones(2, 2)],
        {"weight": torch.ones(2), "bias": np.ones(1, dtype=np.float32)},
        [0.0, 1.0, 0.5],
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.float16),
    ],
    ids=["array", "list", "dict", "numbers", "double", "half"],
)
def test_gradients_come_back_in_the_kind_that_was_given(data: Any) -> None:
    back = quantize_gradients(data).decompress()
    assert type(back) is type(data)
    parts = zip(*(one.values() if isinstance(one, dict) else one for one in (back, data)), strict=True)
    for mine, given in parts:
        assert type(mine) is type(given)
        assert getattr(mine, "dtype", None) == getattr(given, "dtype", None)
        np.testing.assert_allclose(np.asarray(mine), np.asarray(given), atol=0.01)


def test_the_bytes_of_half_precision_are_counted_as_given() -> None:
    assert quantize_gradients(torch.ones(1000, dtype=torch.float16)).original_nbytes == 2000


@pytest.mark.parametrize("data", [torch.arange(3), np.arange(3), ["a"], {"w": None}])
def test_what_is_no_gradient_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match="gradients to compress cannot be"):
        quantize_gradients(data)


def test_a_setting_is_given_once() -> None:
    assert quantize_gradients(num_bits=4).name == quantize_gradients(4).name
    assert sparsify_gradients(sparsity=0.9).name == sparsify_gradients(0.9).name
    with pytest.raises(UsageError, match="two settings"):
        sparsify_gradients(0.5, sparsity=0.9)
