"""Authentication of large chunks: the kinds of tags, which of them this process has, which one two ends use.

    SHA256   keyed BLAKE2b over the chunk's SHA-256: needs nothing but Python; about 1.7 GB/s of one core
    GMAC     AES-256-GMAC of the `cryptography` package; about 20 GB/s with the processor's AES instructions

Both make tags of 128 bits, and neither is the weaker one where it is used: under a key of one direction of
one connection, with a number that never comes again. GMAC needs that number more than the other: two chunks
under one nonce give its key away. The nonce is therefore the counter of the session's messages
(`session_auth`).

A tagger is a function of the message's number and the chunk.
"""

from __future__ import annotations

import enum
import functools
import hmac
import logging
import struct
from collections.abc import Callable
from hashlib import blake2b, sha256
from typing import Final

TAG_BYTES: Final = 16
NUMBER: Final = struct.Struct("<Q")
_NONCE: Final = struct.Struct("<IQ")  # 96 bits, of which 64 count
_CHUNK_KEY: Final = b"paceline chunks, AES-256-GMAC"

Bytes = bytes | bytearray | memoryview
Tagger = Callable[[int, Bytes], bytes]

_log = logging.getLogger("paceline.core")


class Mac(enum.IntFlag):
    """Kinds of tags, as an end offers them; the values travel."""

    SHA256 = 1
    GMAC = 2


_FALLBACK: Final = Mac.SHA256


@functools.cache
def offered() -> Mac:
    """Return what this process can do. Every process can do SHA256."""
    try:
        tagger(Mac.GMAC, bytes(32))(0, b"")
    except Exception as error:  # not installed, broken, or built without AES-GCM
        _log.debug("no AES-GMAC for data between hosts (%r): SHA-256 is used, which is slower", error)
        return _FALLBACK
    return _FALLBACK | Mac.GMAC


def agreed(one: Mac, other: Mac) -> Mac:
    """Return the fastest kind that both ends offer."""
    return Mac.GMAC if one & other & Mac.GMAC else _FALLBACK


def describe(offers: Mac) -> str:
    """Return the kind that two ends with these offers use, in words."""
    if offers & Mac.GMAC:
        return "AES-256-GMAC"
    return "BLAKE2b over SHA-256"


def tagger(kind: Mac, key: bytes) -> Tagger:
    """Make the tags of chunks under a session's `key` of one direction."""
    if kind is Mac.GMAC:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        # A key for nothing else: what AES makes of a nonce must not meet what BLAKE2b makes of the same key.
        encrypt = AESGCM(hmac.digest(key, _CHUNK_KEY, "sha256")).encrypt
        return lambda number, chunk: encrypt(_NONCE.pack(0, number), b"", chunk)
    return lambda number, chunk: keyed_tag(key, number, sha256(chunk).digest())


def keyed_tag(key: bytes, number: int, *parts: Bytes) -> bytes:
    """Return the tag of a message that is small or was digested before."""
    digest = blake2b(NUMBER.pack(number), digest_size=TAG_BYTES, key=key)
    for part in parts:
        digest.update(part)
    return digest.digest()
