"""On a CUDA device the codecs give the same bytes as on a CPU, and residuals follow the tensors."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.compression import Codec, PowerSGD, quantize_gradients
from paceline.comm.compression.codecs import Cast, Quantize, TopK

pytestmark = [
    pytest.mark.leaky("CUDA keeps its descriptors and threads until the process ends"),
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CODECS: list[Codec] = [Cast("fp16"), Cast("bf16"), Quantize(8), Quantize(4), TopK(0.99), TopK(0.5)]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("numel", [0, 1, 257, 300_001])
@pytest.mark.parametrize("ties", [False, True])
def test_the_same_bytes_as_on_a_cpu(codec: Codec, numel: int, ties: bool) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 3
    if ties:
        values = values.round()
    there = codec.encode(values.cuda())
    assert there.is_cuda
    assert torch.equal(there.cpu(), codec.encode(values))
    out, expected = torch.empty(numel, device="cuda"), torch.empty(numel)
    codec.decode(there, out)
    codec.decode(there.cpu(), expected)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_what_is_not_finite_stays_visible(codec: Codec) -> None:
    values = torch.randn(1000, device="cuda")
    values[5], values[600] = float("nan"), float("inf")
    out = torch.empty_like(values)
    codec.decode(codec.encode(values), out)
    assert not out[5].isfinite()
    assert not out[600].isfinite()


def test_a_saved_residual_moves_to_the_device() -> None:
    saved = quantize_gradients(4)
    transfer = saved.open(torch.randn(300), "g")
    transfer.encode(0, 300)
    transfer.close()
    restored = quantize_gradients(4)
    restored.load_state_dict(saved.state_dict())
    flat = torch.zeros(300, device="cuda")
    transfer = restored.open(flat, "g")
    assert torch.equal(flat.cpu(), saved.state_dict()["residual.g"])
    transfer.encode(0, 300)
    transfer.close()
    assert restored.state_dict()["residual.g"].is_cuda


def test_power_sgd() -> None:
    matrix = torch.randn(40, 2, device="cuda") @ torch.randn(2, 30, device="cuda")
    on_cpu = PowerSGD(2)
    on_cpu.reduce([matrix.cpu()], lambda flat: flat)
    compressor = PowerSGD(2)
    compressor.load_state_dict(on_cpu.state_dict())
    (result,) = compressor.reduce([matrix], lambda flat: flat)
    torch.testing.assert_close(result, matrix, rtol=1e-3, atol=1e-3)
