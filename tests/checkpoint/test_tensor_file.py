"""Tensor files are safetensors files: that package reads them, and nothing in them is believed."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load, save

from paceline.checkpoint import tensor_file
from paceline.checkpoint.staging_buffer import ImageBuffer, view_of
from paceline.core.errors import UsageError

EVERY_KIND = {
    name: torch.randint(0, 2, (3, 2)).to(getattr(torch, name))
    for name in tensor_file.CODES
    if name not in ("complex64",)
} | {
    "complex": torch.tensor([1 + 2j, float("nan")], dtype=torch.complex64),
    "number": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
    "transposed": torch.randn(4, 3).t(),
    "strided": torch.arange(20)[::3],
    "needs grad": torch.nn.Parameter(torch.randn(3)),
    "ümläut \n \" '": torch.tensor([float("-inf"), -0.0]),
}


def image_of(tensors: dict[str, torch.Tensor]) -> bytes:
    buffer = ImageBuffer()
    return bytes(buffer.image(buffer.fill(tensors, list(tensors))))


def test_the_safetensors_package_reads_every_kind():
    found = load(image_of(EVERY_KIND))
    assert found.keys() == EVERY_KIND.keys()
    for name, tensor in EVERY_KIND.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        plain = tensor.detach().contiguous().reshape(-1)
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), plain.view(torch.uint8))


def test_what_the_safetensors_package_writes_is_read():
    data = bytearray(save({name: tensor.detach().contiguous() for name, tensor in EVERY_KIND.items()}))
    image = torch.frombuffer(data, dtype=torch.uint8)
    entries = tensor_file.parse(memoryview(data))
    assert {entry.name for entry in entries} == EVERY_KIND.keys()
    for entry in entries:
        read, written = view_of(image, entry), EVERY_KIND[entry.name].detach()
        assert (read.dtype, read.shape) == (written.dtype, written.shape)
        octets = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (read, written)]
        assert torch.equal(*octets)


def test_every_tensor_is_aligned():
    layout = tensor_file.plan([("a", "bool", (3,)), ("b", "float64", (1,)), ("c", "int16", (5,))])
    assert [entry.name for entry in layout.entries] == ["b", "c", "a"]
    assert len(layout.header) % 64 == 0
    assert layout.nbytes == len(layout.header) + 3 + 8 + 10


def test_a_buffer_is_used_again():
    buffer = ImageBuffer()
    tensors = {"a": torch.randn(1000)}
    buffer.fill(tensors, ["a"])
    held = buffer.nbytes
    before = buffer.image(buffer.fill(tensors, ["a"]))
    tensors["a"].add_(1)
    after = buffer.image(buffer.fill(tensors, ["a"]))
    assert before.obj is after.obj or before == after
    assert buffer.nbytes == held
    assert torch.equal(load(bytes(after))["a"], tensors["a"])
    buffer.fill({"a": torch.randn(1 << 20)}, ["a"])
    assert buffer.nbytes > held
    buffer.release()
    assert buffer.nbytes == 0


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.empty(2, device="meta"), "meta"),
        (3.0, "not a tensor"),
    ],
)
def test_what_cannot_be_saved_is_named(tensor, message):
    with pytest.raises(UsageError, match=message) as caught:
        ImageBuffer().fill({"model/odd": tensor}, ["model/odd"])
    assert "model/odd" in str(caught.value)


def test_two_of_one_name():
    with pytest.raises(UsageError, match="two tensors"):
        tensor_file.plan([("a", "int8", (1,)), ("a", "int8", (1,))])


def raw(header: object, data: bytes = b"") -> memoryview:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return memoryview(struct.pack("<Q", len(text)) + text + data)


def field(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (memoryview(b"abc"), "too few"),
        (memoryview(struct.pack("<Q", 2**63)), "header of"),
        (raw(b"{"), "not JSON"),
        (raw([1]), "not an object"),
        (raw({"a": field()}), "describes"),
        (raw({"a": field(dtype="F31")}, b"1234"), "cannot be"),
        (raw({"a": field(shape=(-1,), offsets=(0, -4))}), "cannot be"),
        (raw({"a": field(shape=(2,))}, b"1234"), "cannot be"),
        (raw({"a": 3}), "cannot be"),
        (raw({"a": field(offsets=(4, 8))}, b"12345678"), "hole"),
        (raw({"a": field(), "b": field()}, b"1234"), "overlap"),
        (raw({"a": field()}, b"12345"), "describes"),
    ],
)
def test_headers_that_lie(image, problem):
    with pytest.raises(ValueError, match=problem):
        tensor_file.parse(image)


@settings(max_examples=200)
@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_flipped_header_is_an_error_or_a_header(position, value):
    """Never another exception, never a tensor outside of the file."""
    image = bytearray(image_of({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8)}))
    image[position % len(image)] = value
    try:
        entries = tensor_file.parse(memoryview(image))
    except ValueError:
        return
    assert all(0 <= entry.start <= entry.stop <= len(image) for entry in entries)
