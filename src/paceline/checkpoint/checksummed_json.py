"""Small JSON files that know whether they are whole: a body and, last, the checksum of that body.

A document is valid only if writing its parsed content again gives the same bytes, so that no flipped bit, no
cut and no edit goes unseen, wherever it is. The checksum is against accidents, not against forgers.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

CHECKSUM = "xxh3_128"


class BrokenDocument(Exception):  # noqa: N818 - a finding of the reader, turned into a CheckpointDamage by the caller
    """The bytes are not a document that `encode_document` wrote; the text is the reason."""


class UnknownFormat(Exception):  # noqa: N818 - a finding, as above
    """The document is whole, and of a format that this Paceline does not know."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the 128 bits that stand for `data`, in hexadecimal."""
    return xxhash.xxh3_128(data).hexdigest()


def encode_document(body: dict[str, Any]) -> bytes:
    """Return the document's bytes."""
    inner = json.dumps(body, indent=1, allow_nan=False)
    checksummed = {**body, CHECKSUM: checksum(inner.encode())}
    return json.dumps(checksummed, indent=1, allow_nan=False).encode() + b"\n"


def decode_document(raw: bytes) -> dict[str, Any]:
    """Return the body of a document; BrokenDocument when a single byte is not as it was written."""
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
        same = encode_document(body) == raw
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise BrokenDocument("is damaged: its content does not match its own checksum")
    return body
