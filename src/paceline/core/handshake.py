"""Prove a shared secret to each other before anything else is sent: bytes in, bytes out, no I/O.

    acceptor -> connector   magic, keyed, nonce
    connector -> acceptor   magic, keyed, context, nonce, HMAC("connector", all of the above, bound)
    acceptor -> connector   HMAC("acceptor", all of the above, bound)

Every message has a fixed size and is compared, never interpreted: a stranger cannot have memory allocated or
a parser run. The acceptor sends nothing that depends on the secret before the connector has proved itself;
the two proofs begin with different words, so that neither end's proof can be sent back to it.

    magic     name and number of the protocol: an end of another number is refused with both numbers
    keyed     whether an end has a secret at all: the error for a missing secret is not "wrong secret"
    context   what the connector claims to be (a rank, a stream)
    bound     what both ends see and neither sends: the digests of both certificates where TLS is used. A
              machine in the middle with another certificate of the same authority, and without the secret,
              makes the two ends see different ones, and both proofs fail

A proof holds for that moment only: a relay can pass these three messages on. So both ends derive the keys of
a session from the secret and from everything above, see `session_auth`; no unkeyed session exists.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Final, final

from paceline.core.errors import WireError
from paceline.core.session_auth import SessionKeys, session_keys

_NAME_BYTES: Final = 7
_MAGIC_BYTES: Final = _NAME_BYTES + 1
_HEAD_BYTES: Final = _MAGIC_BYTES + 1
_NONCE_BYTES: Final = 32
PROOF_BYTES: Final = sha256().digest_size
CHALLENGE_BYTES: Final = _HEAD_BYTES + _NONCE_BYTES


@dataclass(frozen=True)
class WireProtocol:
    """The protocol that follows the handshake. `number` grows with every change of what is sent, here or
    there: two numbers that differ do not talk."""

    name: str
    mark: bytes
    number: int
    context_bytes: int = 0

    @cached_property
    def magic(self) -> bytes:
        """The first bytes of both ends."""
        return self.mark.ljust(_NAME_BYTES, b"\0") + bytes([self.number])

    @property
    def answer_bytes(self) -> int:
        """The length of a connector's answer; an acceptor never reads more of a stranger."""
        return _HEAD_BYTES + self.context_bytes + _NONCE_BYTES + PROOF_BYTES

    def check(self, begin: bytes) -> None:
        """Refuse the first bytes of the other end as soon as they cannot be those of this protocol."""
        if self.magic.startswith(begin[:_MAGIC_BYTES]):
            return
        if not self.magic.startswith(begin[:_NAME_BYTES]):
            raise OtherProtocolError(f"it does not speak Paceline's {self.name} protocol")
        raise VersionError(
            f"it speaks {self.name} protocol {begin[_NAME_BYTES]}, this end speaks {self.number}",
            remedy="use one version of Paceline on all machines",
        )


CONTROL: Final = WireProtocol("control", b"PLctl", 3)
"""A worker, an agent or a tool, and the supervisor."""
STORE: Final = WireProtocol("store", b"PLstor", 4)
"""A rank and the store in which ranks meet."""
MESH: Final = WireProtocol("mesh", b"PLmesh", 4, context_bytes=20)
"""Two ranks of a group: from, to, stream, and how each can authenticate bulk data."""
DIAL: Final = WireProtocol("dial", b"PLdial", 3, context_bytes=8)
"""Two workers that may be in one view: from, to."""
DOCTOR: Final = WireProtocol("doctor", b"PLdoct", 1)
"""`paceline doctor --hosts`, and `paceline doctor --serve` on another host."""


class HandshakeError(WireError):
    """The other end did not prove that it holds the secret."""


@final
class OtherProtocolError(HandshakeError):
    """The other end speaks something else."""


@final
class VersionError(HandshakeError):
    """The other end speaks another version of the protocol."""


@final
class KeyedDifferentlyError(HandshakeError):
    """One end has a secret and the other has none."""


@final
class Acceptor:
    """The accepting end of one connection: send `challenge`, feed what comes. When `feed` returns True, the
    connector has proved itself: look at `context`, and send `proof` to accept it."""

    def __init__(self, protocol: WireProtocol, secret: bytes, bound: bytes = b"") -> None:
        self._protocol = protocol
        self._secret = secret
        self._bound = bound
        self._got = b""
        self.challenge: Final = protocol.magic + _keyed(secret) + secrets.token_bytes(_NONCE_BYTES)
        self.context = b""
        self.proof = b""

    @property
    def wanted(self) -> int:
        """The number of bytes that may be read next."""
        return self._protocol.answer_bytes - len(self._got)

    def feed(self, data: bytes) -> bool:
        """Accept bytes; raise HandshakeError as soon as they cannot be a member's."""
        self._got += data
        # The magic is checked as it comes, byte by byte: a peer of another protocol, which may never send as
        # many bytes as an answer has, is refused at once.
        self._protocol.check(self._got)
        if self.wanted < 0:
            raise HandshakeError("it says more than an answer")
        if len(self._got) >= _HEAD_BYTES and self._got[_MAGIC_BYTES:_HEAD_BYTES] != _keyed(self._secret):
            raise KeyedDifferentlyError(
                "it has no secret" if self._secret else "it has a secret, and there is none here"
            )
        if self.wanted:
            return False
        # The proof covers this end's challenge, whose nonce is fresh: one that was recorded before fits no
        # other connection. Only now is anything computed that depends on the secret.
        transcript = self._transcript
        if not hmac.compare_digest(self._got[-PROOF_BYTES:], _prove(self._secret, b"connector", transcript)):
            other = ", or its certificate is not the one that was shown to it" if self._bound else ""
            raise HandshakeError(f"its secret is another{other}")
        self.context = self._got[_HEAD_BYTES : _HEAD_BYTES + self._protocol.context_bytes]
        self.proof = _prove(self._secret, b"acceptor", transcript)
        return True

    def session_keys(self) -> SessionKeys:
        """Return the keys of this connection, once `feed` has returned True."""
        assert self.proof
        return session_keys(self._secret, self._transcript, accepts=True)

    @property
    def _transcript(self) -> bytes:
        # Parts of fixed lengths in one protocol, so that no two transcripts read the same.
        return self.challenge + self._got[:-PROOF_BYTES] + self._bound


@final
class Connector:
    """The connecting end: feed what comes, send what `feed` returns, until `done`."""

    def __init__(
        self, protocol: WireProtocol, secret: bytes, context: bytes = b"", bound: bytes = b""
    ) -> None:
        assert len(context) == protocol.context_bytes
        self._protocol = protocol
        self._secret = secret
        self._context = context
        self._bound = bound
        self._got = b""
        self._transcript = b""
        self.head: Final = protocol.magic + _keyed(secret)
        self.done = False

    @property
    def wanted(self) -> int:
        """The number of bytes that may be read next."""
        return (PROOF_BYTES if self._transcript else CHALLENGE_BYTES) - len(self._got)

    def feed(self, data: bytes) -> bytes:
        """Accept bytes, return what to send now; raise HandshakeError if this is not the acceptor."""
        self._got += data
        if not self._transcript:
            self._protocol.check(self._got)
        if self.wanted:
            return b""
        if self._transcript:
            # The acceptor must prove the secret as well, before this end sends its first message.
            if not hmac.compare_digest(self._got, _prove(self._secret, b"acceptor", self._transcript)):
                raise HandshakeError("it does not know the secret")
            self.done = True
            return b""
        challenge, self._got = self._got, b""
        if challenge[_MAGIC_BYTES:_HEAD_BYTES] != _keyed(self._secret):
            raise KeyedDifferentlyError(
                "it has no secret" if self._secret else "it asks for a secret, and there is none here"
            )
        # A nonce of this end, too: without it an acceptor that records could replay a whole session.
        answer = self.head + self._context + secrets.token_bytes(_NONCE_BYTES)
        self._transcript = challenge + answer + self._bound
        return answer + _prove(self._secret, b"connector", self._transcript)

    def session_keys(self) -> SessionKeys:
        """Return the keys of this connection, once `done`."""
        assert self.done
        return session_keys(self._secret, self._transcript, accepts=False)

    def run(self, read: Callable[[int], bytes], send: Callable[[bytes], object]) -> SessionKeys:
        """Exchange all of it, for a caller that may wait: `read` returns at most as many bytes as asked."""
        try:
            while not self.done:
                if answer := self.feed(read(self.wanted)):
                    send(answer)
        except (VersionError, KeyedDifferentlyError):
            with contextlib.suppress(OSError):
                send(self.head)  # the acceptor can then log the reason too
            raise
        return self.session_keys()


def _keyed(secret: bytes) -> bytes:
    return b"\x01" if secret else b"\x00"


def _prove(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, role + b"\x00" + transcript, "sha256")
