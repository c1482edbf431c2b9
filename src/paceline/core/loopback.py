"""Whether this machine can talk to itself: a network namespace begins with its loopback interface down, and
what connects to 127.0.0.1 there waits for an answer that cannot come."""

from __future__ import annotations

import socket
from typing import Final

from paceline.core.errors import PlatformError

_HOST: Final = "127.0.0.1"
_SECONDS: Final = 5.0


def check() -> None:
    """Connects to a port of its own; PlatformError where nothing answers."""
    try:
        with socket.create_server((_HOST, 0), backlog=1) as listening:
            socket.create_connection(listening.getsockname(), timeout=_SECONDS).close()
    except OSError as error:
        raise PlatformError(
            f"this machine cannot reach itself at {_HOST} ({error.strerror or error}): workers and their "
            "supervisor talk over the loopback interface",
            remedy="bring it up (ip link set lo up), or let a firewall pass what stays on the machine",
        ) from error
