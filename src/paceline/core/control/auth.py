"""Who may speak on the control connection: both sides prove that they hold the job's secret, then are heard.

    acceptor  -> connector    magic, 32 random bytes
    connector -> acceptor     magic, 32 random bytes, HMAC-SHA256(secret, "connector", both sides' bytes)
    acceptor  -> connector    HMAC-SHA256(secret, "acceptor", both sides' bytes)

The acceptor says nothing that depends on the secret before the connector has proved itself, and reads exactly
72 bytes until then: a stranger's bytes are compared, never interpreted. This proves who is at the other end;
it does not hide what is said: between machines that do not trust their network, use TLS as well.
Must not know what is said afterwards.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core.errors import ConfigError, RendezvousError, UsageError

SECRET_BYTES: Final = 32
_MAGIC: Final = b"PLctl\x00\x00\x01"
_NONCE: Final = 32
_PROOF: Final = hashlib.sha256().digest_size
CHALLENGE_BYTES: Final = len(_MAGIC) + _NONCE
ANSWER_BYTES: Final = CHALLENGE_BYTES + _PROOF


@dataclass(frozen=True)
class Tls:
    """Encryption for the control connection: PEM files. Both ends show a certificate of `authority`.

    Names in certificates are not compared with addresses: whoever has a certificate of this authority, and
    the job's secret, belongs to the job.
    """

    certificate: Path
    key: Path
    authority: Path

    def server(self) -> ssl.SSLContext:
        """For the side that accepts."""
        return self._fill(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def client(self) -> ssl.SSLContext:
        """For the side that connects."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return self._fill(context)

    def _fill(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"the certificate {self.certificate}, its key {self.key} or the authority {self.authority} "
                f"cannot be used: {error}",
                remedy="give PEM files: a certificate, its private key without a password, and the "
                "certificate that signed it",
            ) from error
        return context


def new_secret() -> bytes:
    """A job's secret."""
    return secrets.token_bytes(SECRET_BYTES)


@final
class Acceptor:
    """The accepting side of one connection: send `challenge`, feed what comes, until `done` or `refused`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._got = b""
        self.challenge: Final = _MAGIC + self._nonce
        self.proof = b""
        self.refused = ""

    @property
    def wanted(self) -> int:
        """How many bytes may be read next."""
        return ANSWER_BYTES - len(self._got)

    def feed(self, data: bytes) -> bool:
        """Take bytes in; True when the other side has proved itself: `proof` is to be sent then."""
        self._got += data
        if len(self._got) > ANSWER_BYTES or not _MAGIC.startswith(self._got[: len(_MAGIC)]):
            self.refused = "it does not speak Paceline's control protocol"
        elif len(self._got) == ANSWER_BYTES:
            theirs, proof = self._got[len(_MAGIC) : CHALLENGE_BYTES], self._got[CHALLENGE_BYTES:]
            if hmac.compare_digest(proof, _prove(self._secret, b"connector", self._nonce, theirs)):
                self.proof = _prove(self._secret, b"acceptor", self._nonce, theirs)
            else:
                self.refused = "its secret is another"
        return bool(self.proof)


def connect(sock: socket.socket, secret: bytes, seconds: float) -> None:
    """The connecting side, on a blocking socket: prove ourselves, and have the other side prove itself."""
    limit = time.monotonic() + seconds
    greeting = _read(sock, CHALLENGE_BYTES, limit)
    if not greeting.startswith(_MAGIC):
        raise RendezvousError(
            "the other side does not speak Paceline's control protocol",
            remedy="check the address: something else listens there, or it wants TLS",
        )
    theirs = greeting[len(_MAGIC) :]
    ours = secrets.token_bytes(_NONCE)
    sock.sendall(_MAGIC + ours + _prove(secret, b"connector", theirs, ours))
    if not hmac.compare_digest(_read(sock, _PROOF, limit), _prove(secret, b"acceptor", theirs, ours)):
        raise RendezvousError(
            "the other side could not prove that it has the job's secret",
            remedy="check the address: another job may listen there",
        )


def read_secret(path: Path) -> bytes:
    """The secret in a file that `write_secret` made."""
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} holds no job secret: {error}",
            remedy="give the control.secret file of the run's folder, or a copy of it",
        ) from error
    if len(secret) != SECRET_BYTES:
        raise UsageError(
            f"{path} holds no job secret: it has {len(secret)} bytes instead of {SECRET_BYTES}",
            remedy="give the control.secret file of the run's folder, or a copy of it",
        )
    return secret


def _prove(secret: bytes, role: bytes, acceptors: bytes, connectors: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + role + acceptors + connectors, "sha256")


def _read(sock: socket.socket, count: int, limit: float) -> bytes:
    data = b""
    while len(data) < count:
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other side did not answer in time")
        sock.settimeout(left)
        piece = sock.recv(count - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection: it does not know this secret")
        data += piece
    return data
