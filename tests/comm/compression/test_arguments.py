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


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (quantize_gradients, "ctx.all_reduce(grads, compression=quantize_gradients(8))"),
        (sparsify_gradients, "ctx.all_reduce(grads, compression=sparsify_gradients(0.99))"),
        (cast_gradients, 'ctx.all_reduce(grads, compression=cast_gradients("fp16"))'),
    ],
)
@pytest.mark.parametrize(
    "data", [torch.zeros(3, 2), np.zeros((3, 2)), [torch.zeros(3)]], ids=lambda d: type(d).__name__
)
def test_gradients_given_instead_of_a_setting(function: Any, call: str, data: Any) -> None:
    with pytest.raises(UsageError, match=rf"{function.__name__} was given a {type(data).__name__}") as caught:
        function(data)
    assert call in caught.value.remedy
