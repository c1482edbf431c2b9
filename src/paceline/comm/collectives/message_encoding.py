"""Messages as bytes: tensors, arrays and plain Python data, without pickle.

A single tensor or array travels as a short description and its raw memory, copied nowhere on the way out;
everything else goes through `core.plain_data_encoding`. Tensors inside lists and dicts work too. CUDA tensors
arrive on the CPU.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.comm.collectives.reduction_input import check_dense, to_flat
from paceline.comm.ops import dtype_name
from paceline.comm.transport.base import memory_of, tensor_of
from paceline.core import plain_data_encoding
from paceline.core.errors import PeerError

DTYPES = {
    dtype_name(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not dtype_name(dtype).startswith("q")
}


@dataclass(frozen=True, slots=True)
class EncodedMessage:
    """A message as bytes: `head` describes it, `body` is flat uint8 memory."""

    head: bytes
    body: Tensor

    def decoded(self) -> Any:
        return decode_message(self.head, self.body)


@cache
def _teach_wire() -> None:
    plain_data_encoding.register(Tensor, "tensor", _tensor_to_plain, _tensor_from_plain)
    # What state_dict() returns.
    plain_data_encoding.register(OrderedDict, "ordered", lambda pairs: list(pairs.items()), OrderedDict)


def encode_message(message: Any, what: str) -> EncodedMessage:
    _teach_wire()
    if type(message) is Tensor or isinstance(message, torch.nn.Parameter):
        check_dense(message, what)
        head = {"tensor": dtype_name(message.dtype), "shape": list(message.shape)}
        return EncodedMessage(_joined(head), raw_bytes(message))
    if isinstance(message, np.ndarray) and message.dtype.kind in "biufc" and message.dtype.isnative:
        head = {"array": message.dtype.str, "shape": list(message.shape)}
        flat = np.ascontiguousarray(message).reshape(-1).view(np.uint8)
        return EncodedMessage(_joined(head), torch.from_numpy(flat if flat.flags.writeable else flat.copy()))
    return EncodedMessage(
        _joined({"plain": True}), tensor_of(bytearray().join(plain_data_encoding.encode(message)))
    )


def decode_message(head: bytes | memoryview, body: Tensor) -> Any:
    """Return the message again; `body` becomes its memory where it can."""
    _teach_wire()
    about = plain_data_encoding.decode(head)
    if not isinstance(about, dict):
        raise PeerError(
            "a peer sent a message without a description",
            remedy="run the same Paceline version on every rank",
        )
    if "plain" in about:
        return plain_data_encoding.decode(memory_of(body))
    shape = tuple(about["shape"])
    if "tensor" in about:
        return _typed(body, DTYPES[about["tensor"]], shape)
    dtype = np.dtype(about["array"])
    return (body.clone() if body.data_ptr() % dtype.itemsize else body).numpy().view(dtype).reshape(shape)


def _typed(body: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not body.numel():
        # No memory to view: arrays without elements have strides that torch does not take.
        return torch.empty(shape, dtype=dtype)
    if body.data_ptr() % dtype.itemsize:
        body = body.clone()
    return body.view(dtype).view(shape)


def raw_bytes(tensor: Tensor, on_device: bool = False) -> Tensor:
    """Return the tensor's values as flat uint8, on the CPU unless `on_device`; a view where it can be one."""
    return to_flat(tensor, on_device).view(torch.uint8)


def _joined(plain: object) -> bytes:
    return b"".join(plain_data_encoding.encode(plain))


def _tensor_to_plain(tensor: Tensor) -> Any:
    check_dense(tensor, "message")
    return [dtype_name(tensor.dtype), list(tensor.shape), raw_bytes(tensor).numpy()]


def _tensor_from_plain(plain: Any) -> Tensor:
    name, shape, raw = plain
    body = torch.from_numpy(raw if raw.flags.writeable else raw.copy())
    return _typed(body, DTYPES[name], tuple(shape))
