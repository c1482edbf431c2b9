"""The bytes of a shard file.

    head | record 0 | padding | record 1 | ... | index: (offset, length, checksum) per record | foot

The head is eight bytes that name the format. Records begin at multiples of 64 bytes. The foot repeats how
many records there are and where the index begins, so that a file can be understood without its manifest. How
a sample becomes a record is in `data.records`. Must not know where files are kept.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, final

import xxhash

from paceline.core.errors import PacelineError, UsageError
from paceline.core.words import a_kind
from paceline.data.records import to_record

HEAD = b"PLshard1"
ALIGNMENT = 64

_ENTRY = struct.Struct("<QQ16s")
_FOOT = struct.Struct("<QQ8s")
ENTRY_BYTES = _ENTRY.size
FOOT_BYTES = _FOOT.size


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """Where a record is and what its bytes must hash to."""

    offset: int
    length: int
    checksum: bytes


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def encode_sample(sample: Any, number: int) -> bytes:
    """A sample as the bytes of a record."""
    try:
        return to_record(sample, f"sample {number}")
    except PacelineError as error:
        raise UsageError(
            f"sample {number} ({a_kind(sample)}) cannot be written: {error.message}",
            remedy="make samples of tensors, NumPy arrays, numbers, texts, bytes, tuples, lists and dicts "
            "(an image: numpy.asarray(image))",
        ) from error


def encode_index(entries: list[Entry], offset: int) -> bytes:
    """The index and the foot of a file whose index begins at `offset`."""
    rows = b"".join(_ENTRY.pack(entry.offset, entry.length, entry.checksum) for entry in entries)
    return rows + _FOOT.pack(len(entries), offset, HEAD)


def entry_at(index: bytes | bytearray, record: int) -> Entry:
    offset, length, digest = _ENTRY.unpack_from(index, record * ENTRY_BYTES)
    return Entry(offset, length, digest)


def index_bytes(records: int) -> int:
    """How many bytes of a file with so many records are index and foot."""
    return records * ENTRY_BYTES + FOOT_BYTES
