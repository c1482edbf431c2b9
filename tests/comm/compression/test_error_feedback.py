"""Compression and Transfer: nothing is lost for good, a failed call leaves no trace, state can be saved."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from paceline.comm.compression import (
    Compression,
    cast_gradients,
    quantize_gradients,
    sparsify_gradients,
)
from paceline.comm.compression.codecs import Quantize
from paceline.core.errors import InternalError, UsageError

MAKERS = {
    "fp16": lambda: cast_gradients("fp16"),
    "bf16": lambda: cast_gradients("bf16"),
    "int8": lambda: quantize_gradients(8),
    "int4": lambda: quantize_gradients(4),
    "topk0.99": lambda: sparsify_gradients(0.99),
}
every_kind = pytest.mark.parametrize("kind", list(MAKERS))


def gradient(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def send(compression: Compression, flat: Tensor, cuts: list[int] | None = None, name: str = "g") -> Tensor:
    """One call that encodes the segments between `cuts`; returns what a receiver sees."""
    transfer = compression.open(flat, name)
    received = torch.zeros_like(flat)
    bounds = [0, *(cuts or []), flat.numel()]
    for start, stop in itertools.pairwise(bounds):
        encoded = transfer.encode(start, stop)
        assert encoded.numel() == transfer.encoded_bytes(stop - start)
        transfer.decode(encoded, received[start:stop])
    transfer.close()
    return received


def residual(compression: Compression, name: str = "g") -> Tensor:
    return compression.state_dict()[f"residual.{name}"]


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(numel=st.sampled_from([0, 1, 5, 300, 700]), seed=st.integers(0, 999), cut=st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_all_that_was_sent_plus_the_residual_is_all_that_was_given(
    kind: str, dtype: torch.dtype, numel: int, seed: int, cut: float
) -> None:
    compression = MAKERS[kind]()
    given_so_far = torch.zeros(numel, dtype=torch.float64)
    sent_so_far = torch.zeros(numel, dtype=torch.float64)
    for call in range(5):
        contribution = gradient(numel, seed + call).to(dtype)
        given_so_far += contribution
        sent_so_far += send(compression, contribution.clone(), [int(cut * numel)])
    owed = residual(compression).double()
    torch.testing.assert_close(sent_so_far + owed, given_so_far, rtol=0, atol=2e-5)


@every_kind
def test_open_adds_the_residual_in_place_and_encode_replaces_it(kind: str) -> None:
    compression = MAKERS[kind]()
    send(compression, gradient(300))
    owed = residual(compression)
    assert owed.abs().max() > 0
    flat = gradient(300, 1)
    expected = flat + owed
    transfer = compression.open(flat, "g")
    assert torch.equal(flat, expected)
    received = torch.empty(300)
    transfer.decode(transfer.encode(0, 300), received)
    transfer.close()
    assert torch.equal(residual(compression), expected - received)


def test_the_residual_of_a_partial_sum_is_that_of_the_sum() -> None:
    compression = quantize_gradients(4)
    flat = gradient(256)
    transfer = compression.open(flat, "g")
    flat += gradient(256, 1)
    received = torch.empty(256)
    transfer.decode(transfer.encode(0, 256), received)
    transfer.close()
    assert torch.equal(residual(compression), gradient(256) + gradient(256, 1) - received)


def test_positions_that_were_not_encoded_owe_nothing() -> None:
    compression = quantize_gradients(4)
    for call in range(3):
        send(compression, gradient(300, call))
    transfer = compression.open(gradient(300, 3), "g")
    transfer.encode(100, 200)
    transfer.close()
    owed = residual(compression)
    assert owed[100:200].abs().max() > 0
    assert not owed[:100].any()
    assert not owed[200:].any()


@every_kind
def test_abort_leaves_the_residual_as_before(kind: str) -> None:
    compression = MAKERS[kind]()
    transfer = compression.open(gradient(300), "g")
    transfer.encode(0, 300)
    transfer.abort()
    assert set(compression.state_dict()) == {"codec"}

    send(compression, gradient(300))
    before = residual(compression)
    transfer = compression.open(gradient(300, 1), "g")
    transfer.encode(0, 150)
    transfer.abort()
    assert torch.equal(residual(compression), before)
    again = MAKERS[kind]()
    send(again, gradient(300))
    assert torch.equal(send(compression, gradient(300, 2)), send(again, gradient(300, 2)))


def test_ending_twice_is_harmless_and_encoding_afterwards_is_not() -> None:
    compression = quantize_gradients()
    transfer = compression.open(gradient(10), "g")
    transfer.encode(0, 10)
    transfer.close()
    owed = residual(compression)
    transfer.abort()
    assert torch.equal(residual(compression), owed)
    with pytest.raises(InternalError, match="after it had ended"):
        transfer.encode(0, 10)


@every_kind
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_are_seen_once_and_then_forgotten(kind: str, bad: float) -> None:
    compression = MAKERS[kind]()
    flat = gradient(600)
    flat[7] = bad
    assert not send(compression, flat)[7].isfinite()
    assert residual(compression).isfinite().all()
    assert residual(compression)[7] == 0
    assert send(compression, gradient(600, 1)).isfinite().all()


def test_a_double_too_large_for_a_float_saturates() -> None:
    compression = quantize_gradients()
    received = send(compression, torch.tensor([1e300, 1.0], dtype=torch.float64))
    assert received.isfinite().all()
    assert residual(compression)[0] == pytest.approx(1e300)


def test_without_error_feedback_nothing_is_kept() -> None:
    compression = Compression(Quantize(4), error_feedback=False)
    flat = gradient(300)
    first = send(compression, flat)
    assert torch.equal(flat, gradient(300))
    assert torch.equal(send(compression, flat), first)
    assert set(compression.state_dict()) == {"codec"}


@every_kind
def test_a_saved_state_continues_where_it_was(kind: str) -> None:
    original = MAKERS[kind]()
    send(original, gradient(300), name="a")
    send(original, gradient(40), name="b.weight")
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    restored = MAKERS[kind]()
    send(restored, gradient(5), name="forgotten")
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert set(restored.state_dict()) == {"codec", "residual.a", "residual.b.weight"}
    for call in range(3):
        for name, numel in (("a", 300), ("b.weight", 40)):
            flat = gradient(numel, call)
            assert torch.equal(send(original, flat.clone(), name=name), send(restored, flat, name=name))


def test_a_saved_state_is_a_copy() -> None:
    compression = quantize_gradients(4)
    send(compression, gradient(300))
    state = compression.state_dict()
    kept = state["residual.g"].clone()
    send(compression, gradient(300, 1))
    send(compression, gradient(300, 2))
    assert torch.equal(state["residual.g"], kept)


def test_the_state_of_another_compressor_is_refused() -> None:
    saved = quantize_gradients(4)
    send(saved, gradient(10))
    with pytest.raises(UsageError, match=r"written by int4.*this compressor is int8"):
        quantize_gradients(8).load_state_dict(saved.state_dict())
    with pytest.raises(UsageError, match="names no compressor"):
        quantize_gradients(8).load_state_dict({})
    with pytest.raises(UsageError, match="unknown entry 'momentum'"):
        saved.load_state_dict({**saved.state_dict(), "momentum": torch.zeros(1)})
    with pytest.raises(UsageError, match="error_feedback=False"):
        Compression(Quantize(4), error_feedback=False).load_state_dict(saved.state_dict())


def test_one_name_per_tensor() -> None:
    compression = quantize_gradients()
    send(compression, gradient(10))
    for other in (gradient(11), gradient(10).double()):
        untouched = other.clone()
        with pytest.raises(UsageError, match="one name per tensor"):
            compression.open(other, "g")
        assert torch.equal(other, untouched)
    send(compression, gradient(10))


def test_one_call_per_name_at_a_time() -> None:
    compression = quantize_gradients()
    transfer = compression.open(gradient(10), "g")
    with pytest.raises(UsageError, match="already has a call under way for 'g'"):
        compression.open(gradient(10), "g")
    with pytest.raises(UsageError, match=r"cannot be saved while calls are under way: g"):
        compression.state_dict()
    compression.open(gradient(10), "h").close()
    transfer.close()
    compression.open(gradient(10), "g").close()


@pytest.mark.parametrize(
    "flat", [torch.zeros(4, dtype=torch.int64), torch.zeros(2, 2), torch.zeros(4).half()]
)
def test_only_flat_floats_are_taken(flat: Tensor) -> None:
    with pytest.raises(UsageError, match="flat float32 or float64"):
        quantize_gradients().open(flat, "g")


def test_mistakes_of_an_algorithm_are_ours() -> None:
    transfer = quantize_gradients().open(gradient(10), "g")
    with pytest.raises(InternalError, match=r"\[5, 11\)"):
        transfer.encode(5, 11)
    with pytest.raises(InternalError, match="14 bytes for 10 elements, not 13"):
        transfer.decode(torch.zeros(13, dtype=torch.uint8), torch.empty(10))
