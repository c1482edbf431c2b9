"""Who may speak on the control connection: both ends prove that they hold the job's secret and key a session.

    acceptor  -> connector    magic with the protocol's number, 32 random bytes
    connector -> acceptor     magic, 32 random bytes, HMAC-SHA256(secret, "connector", magic, both, bound)
    acceptor  -> connector    HMAC-SHA256(secret, "acceptor", magic, both, bound)

The acceptor sends nothing that depends on the secret before the connector has proved itself, and reads
exactly 72 bytes until then: a stranger's bytes are compared, never interpreted.

The proof says who is there at that moment only: a relay can pass these three messages on. So both ends derive
the keys of a session from the secret and from what was exchanged (`core.sealing`), and a Channel cannot be
made without them: no unkeyed session exists. What a relay injects, changes, drops, repeats or reflects
afterwards does not verify.

`bound` are the SHA-256 digests of both ends' certificates where TLS is used, the acceptor's first, as each
end sees them: a machine in the middle with another certificate of the same authority, and without the
secret, makes the two ends see different certificates, and both proofs fail. TLS hides what is sent; the proof
and the tags do not. Must not know what is sent afterwards.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core import sealing
from paceline.core.errors import ConfigError, RendezvousError, UsageError
from paceline.core.sealing import Session

SECRET_BYTES: Final = 32
# 2: sessions are keyed. An end of another number is refused: there is no session to fall back to.
PROTOCOL: Final = 2
_NAME: Final = b"PLctl\x00\x00"
_MAGIC: Final = _NAME + bytes([PROTOCOL])
_NONCE: Final = 32
_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_PROOF: Final = hashlib.sha256().digest_size
CHALLENGE_BYTES: Final = len(_MAGIC) + _NONCE
ANSWER_BYTES: Final = CHALLENGE_BYTES + _PROOF


@dataclass(frozen=True)
class Tls:
    """Encryption for the control connection: PEM files. Both ends show a certificate of `authority`.

    Names in certificates are not compared with addresses, and a certificate of this authority admits no
    machine by itself: the proof of the job's secret covers both certificates, so both ends must have the
    secret and must see each other's certificate, not that of a machine in between.
    """

    certificate: Path
    key: Path
    authority: Path

    def server(self) -> TlsEnd:
        """For the end that accepts."""
        return TlsEnd(self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)), self._digest(), accepts=True)

    def client(self) -> TlsEnd:
        """For the end that connects."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return TlsEnd(self._fill(context), self._digest(), accepts=False)

    def _fill(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise self._unusable(error) from error
        return context

    def _digest(self) -> bytes:
        """SHA-256 of the certificate that the other end will be shown: the first of the file."""
        try:
            found = _PEM.search(self.certificate.read_text(errors="replace"))
            if found is None:
                raise ValueError("it holds no certificate")
            return hashlib.sha256(ssl.PEM_cert_to_DER_cert(found.group())).digest()
        except (OSError, ValueError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"the certificate {self.certificate}, its key {self.key} or the authority {self.authority} "
            f"cannot be used: {error}",
            remedy="give PEM files: a certificate, its private key without a password, and the "
            "certificate that signed it",
        )


@final
@dataclass(frozen=True)
class TlsEnd:
    """One end's side of TLS. `certificate` is the digest of the certificate it shows."""

    context: ssl.SSLContext
    certificate: bytes
    accepts: bool

    def wrap(self, sock: socket.socket, *, handshake: bool = True) -> ssl.SSLSocket:
        """`handshake=False`: the caller calls do_handshake, on a socket that does not block."""
        return self.context.wrap_socket(sock, server_side=self.accepts, do_handshake_on_connect=handshake)

    def bound(self, sock: socket.socket) -> bytes:
        """What the proof is bound to, after the TLS handshake: both digests, the acceptor's first."""
        assert isinstance(sock, ssl.SSLSocket)
        shown = sock.getpeercert(binary_form=True)
        if not shown:
            raise ConnectionResetError("the other end showed no certificate")
        theirs = hashlib.sha256(shown).digest()
        return self.certificate + theirs if self.accepts else theirs + self.certificate


def new_secret() -> bytes:
    """A job's secret."""
    return secrets.token_bytes(SECRET_BYTES)


@final
class Acceptor:
    """The accepting end of one connection: send `challenge`, feed what comes, until `session` or `refused`.

    `bound` is set before anything is fed: see TlsEnd.
    """

    def __init__(self, secret: bytes, bound: bytes = b"") -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._got = b""
        self.bound = bound
        self.challenge: Final = _MAGIC + self._nonce
        self.proof = b""
        self.session: Session | None = None
        self.refused = ""

    @property
    def wanted(self) -> int:
        """How many bytes may be read next."""
        return ANSWER_BYTES - len(self._got)

    def feed(self, data: bytes) -> bool:
        """Take bytes in; True when the other end has proved itself: `proof` is to be sent then, and what
        follows is the `session`."""
        self._got += data
        if len(self._got) > ANSWER_BYTES or not _MAGIC.startswith(self._got[: len(_MAGIC)]):
            self.refused = _not_ours(self._got)
        elif len(self._got) == ANSWER_BYTES:
            theirs, proof = self._got[len(_MAGIC) : CHALLENGE_BYTES], self._got[CHALLENGE_BYTES:]
            said = _transcript(self._nonce, theirs, self.bound)
            if hmac.compare_digest(proof, _prove(self._secret, b"connector", said)):
                self.proof = _prove(self._secret, b"acceptor", said)
                self.session = sealing.session(self._secret, said, accepts=True)
            else:
                self.refused = "its secret is another, or its certificate is not the one that was shown to it"
        return bool(self.proof)


def connect(sock: socket.socket, secret: bytes, seconds: float, tls: TlsEnd | None = None) -> Session:
    """The connecting end, on a blocking socket: prove ourselves, have the other end prove itself, and key
    what follows. `tls`: the end that wrapped the socket."""
    limit = time.monotonic() + seconds
    bound = tls.bound(sock) if tls is not None else b""
    greeting = _read(sock, CHALLENGE_BYTES, limit)
    if not greeting.startswith(_MAGIC):
        raise RendezvousError(
            f"the other end cannot be joined: {_not_ours(greeting)}",
            remedy="check the address (something else may listen there, or it wants TLS) and have the same "
            "version of Paceline on both machines",
        )
    ours = secrets.token_bytes(_NONCE)
    said = _transcript(greeting[len(_MAGIC) :], ours, bound)
    sock.sendall(_MAGIC + ours + _prove(secret, b"connector", said))
    if not hmac.compare_digest(_read(sock, _PROOF, limit), _prove(secret, b"acceptor", said)):
        raise RendezvousError(
            "the other end could not prove that it has the job's secret",
            remedy="check the address: another job may listen there",
        )
    return sealing.session(secret, said, accepts=False)


def read_secret(path: Path) -> bytes:
    """The secret in a file that `write_secret` made."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise no_secret(path, str(error)) from error
    return parse_secret(text, path)


def parse_secret(text: str, path: Path) -> bytes:
    """The secret that was read from `path`."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError as error:
        raise no_secret(path, str(error)) from error
    if len(secret) != SECRET_BYTES:
        raise no_secret(path, f"it has {len(secret)} bytes instead of {SECRET_BYTES}")
    return secret


def no_secret(path: Path, why: str) -> UsageError:
    """What to raise where a file is no token."""
    return UsageError(
        f"{path} holds no job secret: {why}",
        remedy="give the control.secret file of the run's folder, or a copy of it",
    )


def _not_ours(begin: bytes) -> str:
    """Why these first bytes are refused."""
    if begin.startswith(_NAME) and len(begin) > len(_NAME) and begin[len(_NAME)] != PROTOCOL:
        return f"it speaks control protocol {begin[len(_NAME)]}, this end speaks {PROTOCOL}"
    return "it does not speak Paceline's control protocol"


def _transcript(acceptors: bytes, connectors: bytes, bound: bytes) -> bytes:
    # Fixed lengths, so that no two transcripts read the same: 32 bytes each, and none or 64 bound.
    return _MAGIC + acceptors + connectors + bound


def _prove(secret: bytes, role: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, role + transcript, "sha256")


def _read(sock: socket.socket, count: int, limit: float) -> bytes:
    data = b""
    while len(data) < count:
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end did not answer in time")
        sock.settimeout(left)
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError(
                "the other end closed the connection: it does not know this secret, or a machine in between "
                "shows certificates that are not the two ends' own"
            )
        data += piece
    return data
