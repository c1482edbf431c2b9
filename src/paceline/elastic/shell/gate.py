"""Where the control port listens, and what is said when it cannot.

Must not know who connects.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Final

from paceline.core import limits
from paceline.core.errors import UsageError
from paceline.core.listening import ANY_PORT, Listening, resolves_to_loopback

RETURN_SECONDS: Final = 5.0
_AGAIN_SECONDS: Final = 0.05


def listen(
    host: str,
    port: int,
    preferred: int = 0,
    seconds: float = RETURN_SECONDS,
    listening: Listening = ANY_PORT,
) -> socket.socket:
    """A listening socket; `preferred` is the port of a supervisor that was here before: where other machines
    look for it, so it is tried for so many seconds."""
    if not listening.interface and (loopback := resolves_to_loopback(host)):
        raise UsageError(
            f"bind={host!r} stands for {loopback} on this machine (see /etc/hosts): no other machine could "
            "reach the control port there",
            remedy="give an address of the interface that the others reach (`ip address` lists them), or "
            "interface=; bind='127.0.0.1' where all workers run here",
        )
    until = time.monotonic() + seconds
    while preferred:
        try:
            return listening.open(host, preferred)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                break
        time.sleep(_AGAIN_SECONDS)
    try:
        return listening.open(host, port)
    except OSError as error:
        trouble = error
    # A name that does not resolve: a plain OSError with the resolver's number, which is negative.
    unknown = trouble.errno is not None and trouble.errno < 0
    if unknown or trouble.errno == errno.EADDRNOTAVAIL:
        raise UsageError(
            f"the control port cannot listen at {host}: {trouble.strerror}",
            remedy="give an address of this machine, or 0.0.0.0 for all of them",
        ) from trouble
    asked = f"the control connection has no port at {host}" + (f" (port {port} is asked for)" if port else "")
    raise limits.explained(trouble, asked) from trouble
