"""The bytes of a shard file.

    head | record 0 | padding | record 1 | ... | index: (offset, length, checksum) per record | foot

The head is eight bytes that name the format. Records begin at multiples of 64 bytes. The foot repeats how
many records there are and where the index begins, so that a file can be understood without its manifest. How
a sample becomes a record is in `data.record_encoding`.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple, final

import xxhash

from paceline.core.errors import PacelineError, UsageError
from paceline.core.wording import with_article
from paceline.data.record_encoding import to_record

HEAD = b"PLshard1"
ALIGNMENT = 64

_ENTRY = struct.Struct("<QQ16s")
_FOOT = struct.Struct("<QQ8s")


@final
class RecordEntry(NamedTuple):
    """Place of a record in its file, and the hash that its bytes must have."""

    offset: int
    length: int
    checksum: bytes


def checksum(data: bytes | bytearray | memoryview) -> bytes:
    return xxhash.xxh3_128_digest(data)


def encode_sample(sample: Any, number: int) -> bytes:
    """Return a sample as the bytes of a record."""
    try:
        return to_record(sample, f"sample {number}")
    except PacelineError as error:
        raise UsageError(
            f"sample {number} ({with_article(sample)}) cannot be written: {error.message}",
            remedy="make samples of tensors, NumPy arrays, numbers, texts, bytes, tuples, lists and dicts "
            "(an image: numpy.asarray(image))",
        ) from error


def encode_index(entries: list[RecordEntry], offset: int) -> bytes:
    """Return the index and the foot of a file whose index begins at `offset`."""
    rows = b"".join(_ENTRY.pack(*entry) for entry in entries)
    return rows + _FOOT.pack(len(entries), offset, HEAD)


def entry_at(index: bytes | bytearray, record: int) -> RecordEntry:
    return RecordEntry(*_ENTRY.unpack_from(index, record * _ENTRY.size))


def index_bytes(records: int) -> int:
    """Return the bytes of index and foot of a file with `records` records."""
    return records * _ENTRY.size + _FOOT.size
