"""Every codec: the promised size, the same bytes every time, and what is lost stated as a number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from paceline.comm.compression import Codec
from paceline.comm.compression.codecs import Cast, Quantize, TopK
from paceline.comm.compression.error_feedback import CHUNK

CODECS: list[Codec] = [
    Cast("fp16"),
    Cast("bf16"),
    Quantize(8),
    Quantize(4),
    Quantize(4, block=6),
    TopK(0.99),
    TopK(0.5),
    TopK(0.0),
]
LEVELS = {8: 127, 4: 7}
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)

SIZES = st.sampled_from([0, 1, 2, 3, 7, 64, 255, 256, 257, 600])


@st.composite
def segments(draw: st.DrawFn) -> Tensor:
    """Finite float32: any numbers at all, or gradients of one magnitude or of forty, with some zeros."""
    numel = draw(SIZES)
    kind = draw(st.sampled_from(["any", "even", "wide", "zero"]))
    if kind == "any":
        finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
        return torch.from_numpy(draw(npst.arrays(np.float32, numel, elements=finite)))
    if kind == "zero":
        return torch.zeros(numel)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    exponent = draw(st.integers(-44, 38))
    if kind == "wide":
        values *= 10.0 ** (torch.rand(numel, generator=generator, dtype=torch.float64) * 40 - 20)
    values[torch.rand(numel, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.99]))] = 0.0
    limit = torch.finfo(torch.float32).max
    return (values * 10.0**exponent).clamp(-limit, limit).float()


def decoded(codec: Codec, values: Tensor) -> Tensor:
    encoded = codec.encode(values)
    out = torch.full_like(values, math.nan)
    codec.decode(encoded, out)
    return out


@every_codec
@given(values=segments())
@settings(max_examples=60, deadline=None)
def test_size_is_as_promised_and_bytes_are_deterministic(codec: Codec, values: Tensor) -> None:
    before = values.clone()
    first, second = codec.encode(values), codec.encode(values)
    assert first.dtype == torch.uint8
    assert first.shape == (codec.encoded_bytes(values.numel()),)
    assert torch.equal(first, second)
    assert torch.equal(decoded(codec, values), decoded(codec, values))
    assert torch.equal(values, before)


@pytest.mark.parametrize("codec", [Cast("bf16"), TopK(0.99), TopK(0.5), TopK(0.0)], ids=lambda c: c.name)
@given(values=segments())
@settings(max_examples=100, deadline=None)
def test_decoded_plus_residual_is_the_input_bit_for_bit(codec: Codec, values: Tensor) -> None:
    sent = decoded(codec, values)
    residual = values - sent
    assert torch.equal(sent + residual, values)
    assert torch.equal(sent.double() + residual.double(), values.double())


@given(values=segments())
@settings(max_examples=100, deadline=None)
def test_fp16_is_exact_up_to_twice_its_largest_number_and_saturates_beyond(values: Tensor) -> None:
    sent = decoded(Cast("fp16"), values)
    residual = values - sent
    exact = values.abs() <= 2 * 65504
    assert torch.equal((sent + residual)[exact], values[exact])
    assert sent.abs().max() <= 65504 if values.numel() else True
    assert torch.equal(sent[~exact], 65504 * values[~exact].sign())
    assert_residual_up_to_rounding(values, sent, residual)


@pytest.mark.parametrize("codec", [Quantize(8), Quantize(4), Quantize(4, block=6)], ids=lambda c: c.name)
@given(values=segments())
@settings(max_examples=100, deadline=None)
def test_quantised_loses_at_most_half_a_step_of_its_block(codec: Quantize, values: Tensor) -> None:
    sent = decoded(codec, values)
    assert_residual_up_to_rounding(values, sent, values - sent)
    levels = LEVELS[codec.num_bits]
    for start in range(0, values.numel(), codec.block):
        block = values[start : start + codec.block].double()
        lost = (block - sent[start : start + codec.block].double()).abs().max()
        top = block.abs().max()
        # Halves of steps are hit up to the rounding of scale, quotient and product.
        assert lost <= (top / levels / 2 * (1 + 1e-4) if top >= 1.5e-36 else top)


def assert_residual_up_to_rounding(values: Tensor, sent: Tensor, residual: Tensor) -> None:
    lost = values.double() - sent.double()
    assert ((lost - residual.double()).abs() <= lost.abs() * 2.0**-24 * (1 + 1e-9)).all()


@given(values=segments(), sparsity=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 0.999]))
@settings(max_examples=100, deadline=None)
def test_top_k_sends_the_largest_and_the_first_among_equals(values: Tensor, sparsity: float) -> None:
    codec = TopK(sparsity)
    order = sorted(range(values.numel()), key=lambda i: (-abs(values[i].item()), i))
    kept = order[: codec.kept(values.numel())]
    expected = torch.zeros_like(values)
    expected[kept] = values[kept]
    assert torch.equal(decoded(codec, values), expected)


@pytest.mark.parametrize(
    ("numel", "kept"), [(0, 0), (1, 1), (99, 1), (100, 1), (101, 2), (1000, 10), (6553600, 65536)]
)
def test_top_k_counts_as_in_decimal(numel: int, kept: int) -> None:
    assert TopK(0.99).kept(numel) == kept
    assert TopK(0.99).encoded_bytes(numel) == 8 * kept


def large(kind: str) -> Tensor:
    numel = (1 << 17) + 5
    values = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    if kind == "ties":
        return (values * 2).round()
    if kind == "mostly zero":
        return values * (torch.arange(numel) % 1000 == 0)
    if kind == "misleading sample":
        # The sample sees only the small ones, then only the large ones.
        return torch.where(torch.arange(numel) % 61 == 0, values * 1e-6, values)
    if kind == "flattering sample":
        return torch.where(torch.arange(numel) % 61 == 0, values * 1e6, values)
    return values


@pytest.mark.parametrize("sparsity", [0.5, 0.9, 0.99, 0.99999])
@pytest.mark.parametrize("kind", ["normal", "ties", "mostly zero", "misleading sample", "flattering sample"])
def test_top_k_of_many_elements_equals_a_stable_sort(kind: str, sparsity: float) -> None:
    values, codec = large(kind), TopK(sparsity)
    kept = values.abs().sort(descending=True, stable=True).indices[: codec.kept(values.numel())]
    expected = torch.zeros_like(values)
    expected[kept] = values[kept]
    assert torch.equal(decoded(codec, values), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_is_quantised_alike_wherever_the_loop_is_cut(bits: int) -> None:
    codec = Quantize(bits)
    values = torch.randn(2 * CHUNK + 300, generator=torch.Generator().manual_seed(4))
    whole = decoded(codec, values)
    for start in (0, CHUNK - 256, CHUNK, 2 * CHUNK):
        piece = values[start : start + 512]
        assert torch.equal(decoded(codec, piece)[:256], whole[start : start + 256])


@every_codec
def test_bytes_at_an_odd_address_are_decoded(codec: Codec) -> None:
    values = torch.randn(300, generator=torch.Generator().manual_seed(5))
    encoded = codec.encode(values)
    shifted = torch.empty(encoded.numel() + 1, dtype=torch.uint8)[1:]
    shifted.copy_(encoded)
    out = torch.empty(300)
    codec.decode(shifted, out)
    assert torch.equal(out, decoded(codec, values))


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 299, 520])
def test_what_is_not_finite_stays_visible(codec: Codec, bad: float, position: int) -> None:
    values = torch.randn(521, generator=torch.Generator().manual_seed(6))
    values[position] = bad
    sent = decoded(codec, values)
    assert not sent[position].isfinite()
    if isinstance(codec, Quantize):
        block = position // codec.block
        rows = torch.arange(521) // codec.block
        assert torch.equal(sent.isnan(), rows == block)


@every_codec
def test_the_largest_number_does_not_become_an_infinity(codec: Codec) -> None:
    largest = torch.finfo(torch.float32).max
    assert decoded(codec, torch.tensor([largest, -largest, 1.0])).isfinite().all()


def test_sizes_on_the_wire() -> None:
    million = 1 << 20
    sizes = {codec.name: codec.encoded_bytes(million) for codec in CODECS}
    assert sizes["fp16"] == sizes["bf16"] == 2 * million
    assert sizes["int8"] == million + 4 * million // 256
    assert sizes["int4"] == million // 2 + 4 * million // 256
    assert sizes["topk0.99"] == 8 * 10486
