"""Small JSON files that know whether they are whole: a body and, last, the checksum of that body.

A document is valid only if writing its parsed content again gives the same bytes, so that no flipped bit, no
cut and no edit goes unseen, wherever it is. The checksum is against accidents, not against forgers. Must not
know what the documents say.
"""

from __future__ import annotations

import json
import math
from typing import Any

import xxhash

CHECKSUM = "xxh3_128"


class BrokenDocument(Exception):  # noqa: N818 - a finding of the reader, turned into a Damage by whoever asked
    """The bytes are not a document that `seal` wrote; the text says what is wrong."""


class UnknownFormat(Exception):  # noqa: N818 - a finding, as above
    """The document is whole, and of a format that this Paceline does not know."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    """The 128 bits that stand for `data`, in hexadecimal."""
    return xxhash.xxh3_128(data).hexdigest()


def seal(body: dict[str, Any]) -> bytes:
    """The document's bytes."""
    inner = json.dumps(body, indent=1, allow_nan=False)
    sealed = {**body, CHECKSUM: checksum(inner.encode())}
    return json.dumps(sealed, indent=1, allow_nan=False).encode() + b"\n"


def unseal(raw: bytes) -> dict[str, Any]:
    """The body of a document; BrokenDocument when a single byte is not as it was written."""
    if not raw:
        raise BrokenDocument("is empty")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BrokenDocument(f"is damaged or cut off: not JSON ({error})") from None
    if not isinstance(body, dict) or CHECKSUM not in body:
        raise BrokenDocument("is damaged: it has no checksum of itself")
    del body[CHECKSUM]
    try:
        same = seal(body) == raw
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise BrokenDocument("is damaged: its content does not match its own checksum")
    return body


def finite(value: float) -> float | str:
    """A number as JSON has it: NaN and infinities, which JSON lacks, become strings."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
