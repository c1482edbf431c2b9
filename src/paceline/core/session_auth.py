"""Authenticate every message of a proven connection: session keys and sequence numbers, without any I/O.

A handshake proves that both ends hold the secret at one moment. A relay may pass that proof on and then speak
for either end, so the proof alone protects nothing that follows. Both ends therefore derive two session keys,
one per direction, from the secret and from everything the handshake exchanged (the transcript: both nonces,
and the certificates where TLS is used), and tag every message with a keyed BLAKE2b over its sequence number
and its bytes. A relay without the secret cannot make a tag; a message that was changed, repeated, dropped,
reordered, reflected or taken from another session does not verify. Large chunks have tags of the kind that
both ends agreed on (`mac_algorithms`); they are counted together with the other messages.

Messages are authenticated, not hidden: TLS hides them.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final, Self, final

from paceline.core.errors import WireError
from paceline.core.mac_algorithms import TAG_BYTES, Bytes, Mac, keyed_tag, tagger

__all__ = ["TAG_BYTES", "IncomingTags", "OutgoingTags", "SessionKeys", "session_keys"]

_KEY_BYTES: Final = 32


class _Direction:
    """One direction of a connection: its key, and the number of the next message. Both ends count, and the
    number never travels: a message that was dropped, repeated or reordered meets another number than the one
    that its tag was made with."""

    def __init__(self, key: bytes, mac: Mac = Mac.SHA256) -> None:
        self._key = key
        self._chunk_tag = tagger(mac, key)
        self._number = 0

    def by(self, mac: Mac) -> Self:
        """Return the same direction with chunks tagged by `mac`; before its first message, because the copy
        counts from 0 again, and no number may be used twice under one key."""
        assert self._number == 0
        return type(self)(self._key, mac)


@final
class OutgoingTags(_Direction):
    """The sending half of one direction: a tag for each message, in order."""

    def tag(self, *parts: Bytes) -> bytes:
        """Return the tag of the next message, whose bytes are the parts one after the other."""
        return keyed_tag(self._key, self._next(), *parts)

    def tag_chunk(self, chunk: Bytes) -> bytes:
        """Return the tag of the next message, a large chunk."""
        return self._chunk_tag(self._next(), chunk)

    def _next(self) -> int:
        # Counted before the tag is made: no number is used twice, also where making a tag failed.
        number = self._number
        self._number += 1
        return number


@final
class IncomingTags(_Direction):
    """The receiving half of one direction."""

    def check(self, tag: Bytes, *parts: Bytes) -> None:
        """Accept the next message, or raise: the connection cannot be believed from here on."""
        self._compare(tag, keyed_tag(self._key, self._number, *parts))

    def check_chunk(self, tag: Bytes, chunk: Bytes) -> None:
        """Verify the tag of a bulk chunk; raise on a mismatch."""
        self._compare(tag, self._chunk_tag(self._number, chunk))

    def _compare(self, tag: Bytes, right: bytes) -> None:
        # In constant time: where the first wrong byte stands must not show in how long this takes.
        if not hmac.compare_digest(tag, right):
            raise WireError(
                f"message {self._number} does not carry the tag of this session: it was changed, repeated or "
                "made by another party on the way",
                remedy="check what is between the two machines (a proxy, a port forwarding)",
            )
        self._number += 1


@dataclass(frozen=True)
class SessionKeys:
    """Both directions of one connection, as one end sees them."""

    outgoing: OutgoingTags
    incoming: IncomingTags

    def by(self, mac: Mac) -> SessionKeys:
        """Return the session with chunks tagged by `mac`, which both ends must have agreed on; before its
        first message."""
        return SessionKeys(self.outgoing.by(mac), self.incoming.by(mac))


def session_keys(secret: bytes, transcript: bytes, *, accepts: bool) -> SessionKeys:
    """Return the session of one end. `transcript` is what the handshake exchanged, equal on both ends and
    never the same twice: it holds a fresh nonce of each end. `accepts`: this end accepted the connection."""
    # A key per direction: a message that is reflected to its sender fails there, though its number fits. The
    # transcript holds a fresh nonce of each end, so no message of another session fits either.
    by_connector = _derive(secret, b"paceline connector to acceptor", transcript)
    by_acceptor = _derive(secret, b"paceline acceptor to connector", transcript)
    if accepts:
        return SessionKeys(OutgoingTags(by_acceptor), IncomingTags(by_connector))
    return SessionKeys(OutgoingTags(by_connector), IncomingTags(by_acceptor))


def _derive(secret: bytes, purpose: bytes, transcript: bytes) -> bytes:
    # A secret may be longer than a BLAKE2b key: HMAC takes any length.
    return hmac.digest(secret, purpose + b"\x00" + transcript, "sha256")[:_KEY_BYTES]
