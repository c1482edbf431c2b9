"""The safetensors format: eight bytes of length, a JSON header, then every tensor's memory, without holes.

`plan` lays tensors out in one image of the file, `parse` reads a header back and believes nothing in it. Wide
types come first, so that every tensor is aligned in the image.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import ResourceError, UsageError

_LENGTH: Final = struct.Struct("<Q")
_ALIGNMENT: Final = 64
_LONGEST_HEADER: Final = 100_000_000
_METADATA: Final = "__metadata__"

# torch's name of a dtype -> the format's name and bytes per element.
CODES: Final[dict[str, tuple[str, int]]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "complex64": ("C64", 8),
}
_BY_CODE: Final = {code: (name, width) for name, (code, width) in CODES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: its bytes are image[start:stop]."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorFileLayout:
    """An image of a file: the header's bytes, then the entries."""

    header: bytes
    entries: tuple[TensorEntry, ...]
    nbytes: int


def plan(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> TensorFileLayout:
    """Return where each (name, dtype, shape) goes."""
    wanted = sorted(
        ((name, dtype, shape, _width(name, dtype)) for name, dtype, shape in tensors),
        key=lambda item: (-item[3], item[0]),
    )
    fields: dict[str, Any] = {_METADATA: {"format": "pt"}}
    position = 0
    for name, dtype, shape, width in wanted:
        if name in fields:
            raise UsageError(f"two tensors are called {name!r}", remedy="give every tensor its own name")
        end = position + width * math.prod(shape)
        fields[name] = {"dtype": CODES[dtype][0], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNMENT)
    header = _LENGTH.pack(len(text)) + text
    entries = []
    for name, dtype, shape, _ in wanted:
        start, stop = fields[name]["data_offsets"]
        entries.append(TensorEntry(name, dtype, shape, len(header) + start, len(header) + stop))
    return TensorFileLayout(header, tuple(entries), len(header) + position)


def parse(image: memoryview) -> list[TensorEntry]:
    """Return the entries of a file's image; ValueError where its header is wrong."""
    if len(image) < _LENGTH.size:
        raise ValueError(f"has {len(image)} bytes, too few for a header")
    (length,) = _LENGTH.unpack(image[: _LENGTH.size])
    base = _LENGTH.size + length
    if length > _LONGEST_HEADER or base > len(image):
        raise ValueError(f"has a header of {length} bytes in a file of {len(image)}")
    try:
        fields = json.loads(bytes(image[_LENGTH.size : base]))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has a header that is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError("has a header that is not an object")
    fields.pop(_METADATA, None)
    entries = sorted((_entry(name, field, base) for name, field in fields.items()), key=lambda e: e.start)
    position = base
    for entry in entries:
        if entry.start != position:
            raise ValueError(f"has a hole or an overlap before tensor {entry.name!r}")
        position = entry.stop
    if position != len(image):
        raise ValueError(f"has {len(image)} bytes where its header describes {position}")
    return entries


def _width(name: str, dtype: str) -> int:
    try:
        return CODES[dtype][1]
    except KeyError:
        raise UsageError(
            f"tensor {name!r} has the dtype {dtype}, which safetensors files cannot hold",
            remedy=f"convert it to one of {', '.join(CODES)}",
        ) from None


def _entry(name: str, field: Any, base: int) -> TensorEntry:
    try:
        dtype, width = _BY_CODE[field["dtype"]]
        shape = tuple(field["shape"])
        start, stop = field["data_offsets"]
        good = all(type(size) is int and size >= 0 for size in (*shape, start, stop))
        good = good and stop - start == width * math.prod(shape)
    except (KeyError, TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(f"describes tensor {name!r} in a way that cannot be")
    return TensorEntry(name, dtype, shape, base + start, base + stop)


# Huge pages; and a state that grows a little does not need new memory each time.
IMAGE_STEP: Final = 2 << 20


def image_memory(nbytes: int) -> mmap.mmap:
    """Return at least `nbytes` of anonymous memory for an image, in huge pages where the system gives them.
    It begins on a page, so that the disk can read the image by itself (O_DIRECT)."""
    unit = IMAGE_STEP if nbytes >= IMAGE_STEP else mmap.PAGESIZE
    size = max(unit, -(-nbytes // unit) * unit)
    try:
        region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"{size / 2**20:.0f} MiB of memory for a copy of the state cannot be had: {error}",
            remedy="give the job more memory: a rank keeps one copy of the share it saves",
        ) from error
    if unit == IMAGE_STEP:
        region.madvise(mmap.MADV_HUGEPAGE)
    return region
