"""TLS for connections that are proven with a secret: what it needs, and what a proof is bound to.

TLS hides what is sent; the proof of the secret (`handshake`) admits, and covers both ends' certificates.
"""

from __future__ import annotations

import hashlib
import re
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.core.errors import ConfigError

_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True)
class Tls:
    """Encryption of connections: PEM files. Both ends show a certificate of `authority`.

    Names in certificates are not compared with addresses, and a certificate of this authority admits no
    machine by itself: the proof of the job's secret covers both certificates, so both ends must have the
    secret and must see each other's certificate, not that of a machine in between.
    """

    certificate: Path
    key: Path
    authority: Path

    def server(self) -> TlsEnd:
        """Return the accepting end."""
        return self._end(accepts=True)

    def client(self) -> TlsEnd:
        """Return the connecting end."""
        return self._end(accepts=False)

    def _end(self, *, accepts: bool) -> TlsEnd:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
            # The other end is shown the first certificate of the file.
            found = _PEM.search(self.certificate.read_text(errors="replace"))
            if found is None:
                raise ValueError("it holds no certificate")
            shown = hashlib.sha256(ssl.PEM_cert_to_DER_cert(found.group())).digest()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the certificate {self.certificate}, its key {self.key} or the authority {self.authority} "
                f"cannot be used: {error}",
                remedy="give PEM files: a certificate, its private key without a password, and the "
                "certificate that signed it",
            ) from error
        return TlsEnd(context, shown, accepts)


@final
@dataclass(frozen=True)
class TlsEnd:
    """One end's side of TLS. `certificate` is the digest of the certificate it shows."""

    context: ssl.SSLContext
    certificate: bytes
    accepts: bool

    def wrap(self, sock: socket.socket, *, handshake: bool = True) -> ssl.SSLSocket:
        """Wrap `sock`. `handshake=False`: the caller does the handshake, on a socket that does not block."""
        return self.context.wrap_socket(sock, server_side=self.accepts, do_handshake_on_connect=handshake)

    def bound(self, sock: socket.socket) -> bytes:
        """Return what the proof is bound to, after the TLS handshake: both digests, the acceptor's first."""
        assert isinstance(sock, ssl.SSLSocket)
        shown = sock.getpeercert(binary_form=True)
        if not shown:
            raise ConnectionResetError("the other end showed no certificate")
        theirs = hashlib.sha256(shown).digest()
        return self.certificate + theirs if self.accepts else theirs + self.certificate
