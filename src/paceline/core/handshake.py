"""Prove a shared secret to each other before anything else is said: bytes in, bytes out, no I/O.

    acceptor -> connector   magic, keyed, nonce
    connector -> acceptor   magic, keyed, context, nonce, HMAC("connector", all of the above)
    acceptor -> connector   HMAC("acceptor", all of the above)

Every message has a fixed size and is compared, never interpreted: a stranger cannot have memory allocated
or a parser run. The acceptor says nothing that depends on the secret before the connector has proved
itself. The context is what the connector claims to be (a rank, a stream); it is covered by both proofs.
`keyed` says whether an end has a secret at all: where one end has none, both can say so instead of "wrong
secret". Both ends derive the session's keys from everything that was exchanged, see `sealing`.

Must not know sockets, nor what is said afterwards.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, final

from paceline.core.errors import WireError
from paceline.core.sealing import Session, session

MAGIC_BYTES: Final = 8
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = sha256().digest_size
_HEAD_BYTES: Final = MAGIC_BYTES + 1
_CHALLENGE_BYTES: Final = _HEAD_BYTES + NONCE_BYTES


@dataclass(frozen=True)
class Protocol:
    """What is spoken after the handshake (name and version in 8 bytes), and the size of the context."""

    magic: bytes
    context_bytes: int = 0

    def __post_init__(self) -> None:
        assert len(self.magic) == MAGIC_BYTES

    @property
    def answer_bytes(self) -> int:
        """What a connector sends; an acceptor never reads more of a stranger."""
        return _HEAD_BYTES + self.context_bytes + NONCE_BYTES + PROOF_BYTES


class HandshakeError(WireError):
    """The other end did not prove that it holds the secret."""


class KeyedDifferentlyError(HandshakeError):
    """One end has a secret and the other has none."""


@final
class Acceptor:
    """The accepting end of one connection: send `challenge`, feed what comes. When `feed` returns True, the
    connector has proved itself: look at `context`, and send `proof` to accept it."""

    def __init__(self, protocol: Protocol, secret: bytes) -> None:
        self._protocol = protocol
        self._secret = secret
        self._got = b""
        self.challenge: Final = protocol.magic + _keyed(secret) + secrets.token_bytes(NONCE_BYTES)
        self.context = b""
        self.proof = b""

    @property
    def wanted(self) -> int:
        """How many bytes may be read next."""
        return self._protocol.answer_bytes - len(self._got)

    def feed(self, data: bytes) -> bool:
        """Take bytes in; raise HandshakeError as soon as they cannot be a member's."""
        self._got += data
        magic = self._got[:MAGIC_BYTES]
        if self.wanted < 0 or not self._protocol.magic.startswith(magic):
            raise HandshakeError("it does not speak this protocol")
        if len(self._got) >= _HEAD_BYTES and self._got[MAGIC_BYTES:_HEAD_BYTES] != _keyed(self._secret):
            raise KeyedDifferentlyError(
                "it has no secret" if self._secret else "it has a secret, and there is none here"
            )
        if self.wanted:
            return False
        said, proof = self._got[:-PROOF_BYTES], self._got[-PROOF_BYTES:]
        transcript = self.challenge + said
        if not hmac.compare_digest(proof, _prove(self._secret, b"connector", transcript)):
            raise HandshakeError("its secret is another")
        self.context = said[_HEAD_BYTES:-NONCE_BYTES]
        self.proof = _prove(self._secret, b"acceptor", transcript)
        return True

    def session(self) -> Session:
        """The keys of this connection, once `feed` has returned True."""
        return session(self._secret, self.challenge + self._got[:-PROOF_BYTES], accepts=True)


@final
class Connector:
    """The connecting end: feed what comes, send what `feed` returns, until `done`."""

    def __init__(self, protocol: Protocol, secret: bytes, context: bytes = b"") -> None:
        assert len(context) == protocol.context_bytes
        self._protocol = protocol
        self._secret = secret
        self._context = context
        self._got = b""
        self._transcript = b""
        self.done = False

    @property
    def wanted(self) -> int:
        """How many bytes may be read next."""
        return (PROOF_BYTES if self._transcript else _CHALLENGE_BYTES) - len(self._got)

    def feed(self, data: bytes) -> bytes:
        """Take bytes in, return what is to be sent now; raise HandshakeError if this is not the acceptor."""
        self._got += data
        if self._transcript:
            return self._check_proof()
        if not self._protocol.magic.startswith(self._got[:MAGIC_BYTES]):
            raise HandshakeError("it does not speak this protocol")
        if self.wanted:
            return b""
        challenge, self._got = self._got, b""
        if challenge[MAGIC_BYTES:_HEAD_BYTES] != _keyed(self._secret):
            raise KeyedDifferentlyError(
                "it has no secret" if self._secret else "it asks for a secret, and there is none here"
            )
        said = self._protocol.magic + _keyed(self._secret) + self._context + secrets.token_bytes(NONCE_BYTES)
        self._transcript = challenge + said
        return said + _prove(self._secret, b"connector", self._transcript)

    def _check_proof(self) -> bytes:
        if not self.wanted:
            if not hmac.compare_digest(self._got, _prove(self._secret, b"acceptor", self._transcript)):
                raise HandshakeError("it does not know the secret")
            self.done = True
        return b""

    def session(self) -> Session:
        """The keys of this connection, once `done`."""
        assert self.done
        return session(self._secret, self._transcript, accepts=False)


def no_answer(protocol: Protocol, secret: bytes) -> bytes:
    """What a connector says that cannot prove itself because only the other end has a secret: the head of an
    answer, by which the acceptor learns why."""
    return protocol.magic + _keyed(secret)


def _keyed(secret: bytes) -> bytes:
    return b"\x01" if secret else b"\x00"


def _prove(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, role + b"\x00" + transcript, "sha256")
