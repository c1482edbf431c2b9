"""Authenticate every message of a proven connection: session keys and sequence numbers, without any I/O.

A handshake proves that both ends hold the secret at one moment. A relay may pass that proof on and then speak
for either end, so the proof alone protects nothing that follows. Both ends therefore derive two session keys,
one per direction, from the secret and from everything the handshake exchanged (the transcript: both nonces,
and the certificates where TLS is used), and tag every message with a keyed BLAKE2b over its sequence number
and its bytes. A relay without the secret cannot make a tag; a message that was changed, repeated, dropped,
reordered, reflected or taken from another session does not verify.

Messages are authenticated, not hidden: TLS hides them.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, final

from paceline.core.errors import WireError

TAG_BYTES: Final = 16
_KEY_BYTES: Final = 32
_NUMBER: Final = struct.Struct("<Q")


@final
class Sealer:
    """The sending half of one direction: a tag for each message, in order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def tag(self, *parts: bytes | bytearray | memoryview) -> bytes:
        """The tag of the next message, whose bytes are the parts one after the other."""
        tag = _tag(self._key, self._number, parts)
        self._number += 1
        return tag


@final
class Opener:
    """The receiving half of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def check(self, tag: bytes | bytearray | memoryview, *parts: bytes | bytearray | memoryview) -> None:
        """Accept the next message, or raise: the connection cannot be believed from here on."""
        if not hmac.compare_digest(tag, _tag(self._key, self._number, parts)):
            raise WireError(
                f"message {self._number} does not carry the tag of this session: it was changed, repeated or "
                "made by another party on the way",
                remedy="check what is between the two machines (a proxy, a port forwarding)",
            )
        self._number += 1


@dataclass(frozen=True)
class Session:
    """Both directions of one connection, as one end sees them."""

    outgoing: Sealer
    incoming: Opener


def session(secret: bytes, transcript: bytes, *, accepts: bool) -> Session:
    """The session of one end. `transcript` is what the handshake exchanged, equal on both ends and never the
    same twice: it holds a fresh nonce of each end. `accepts`: this end accepted the connection."""
    by_connector = _derive(secret, b"paceline connector to acceptor", transcript)
    by_acceptor = _derive(secret, b"paceline acceptor to connector", transcript)
    if accepts:
        return Session(Sealer(by_acceptor), Opener(by_connector))
    return Session(Sealer(by_connector), Opener(by_acceptor))


def _derive(secret: bytes, purpose: bytes, transcript: bytes) -> bytes:
    # A secret may be longer than a BLAKE2b key: HMAC takes any length.
    return hmac.digest(secret, purpose + b"\x00" + transcript, "sha256")[:_KEY_BYTES]


def _tag(key: bytes, number: int, parts: tuple[bytes | bytearray | memoryview, ...]) -> bytes:
    digest = blake2b(_NUMBER.pack(number), digest_size=TAG_BYTES, key=key)
    for part in parts:
        digest.update(part)
    return digest.digest()
