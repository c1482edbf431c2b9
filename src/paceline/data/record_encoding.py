"""One value as bytes and back: tensors, arrays and plain Python data, no pickle.

    length of the description: u32 | description | padding | memory

The memory begins at a multiple of 64 bytes, so that a tensor that comes back is a view of it.
"""

from __future__ import annotations

import struct
from typing import Any

import torch

from paceline.comm.collectives.message_encoding import decode_message, encode_message
from paceline.comm.transport.base import memory_of
from paceline.core.errors import PeerError, WireError

_HEAD = struct.Struct("<I")
_ALIGNMENT = 64


def to_record(value: Any, what: str) -> bytes:
    """Return the bytes of a value; UsageError names the place in `value` that cannot be written."""
    encoded = encode_message(value, what)
    padding = -(_HEAD.size + len(encoded.head)) % _ALIGNMENT
    return b"".join((_HEAD.pack(len(encoded.head)), encoded.head, bytes(padding), memory_of(encoded.body)))


def from_record(record: bytearray) -> Any:
    """Return the value again; its tensors are views of `record` where they can be, and may be written to."""
    if len(record) < _HEAD.size:
        raise WireError(f"a record of {len(record)} bytes is shorter than its head")
    (length,) = _HEAD.unpack_from(record)
    start = _HEAD.size + length
    start += -start % _ALIGNMENT
    if start > len(record):
        raise WireError(f"a record of {len(record)} bytes claims a description of {length}")
    body = (
        torch.frombuffer(record, dtype=torch.uint8, offset=start)
        if start < len(record)
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    try:
        return decode_message(memoryview(record)[_HEAD.size : _HEAD.size + length], body)
    except (KeyError, TypeError, ValueError, RuntimeError, PeerError) as error:
        if isinstance(error, WireError):
            raise
        raise WireError(f"a record of {len(record)} bytes cannot be read: {error}") from error
