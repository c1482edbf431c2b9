"""The port at which rank 0 serves the ranks' store."""

from __future__ import annotations

import contextlib
import os
import random
import socket

from paceline.comm.rendezvous.environment import DERIVED_PORTS
from paceline.core.errors import ResourceError
from paceline.core.listen_address import ListenAddress


def free_port() -> int:
    """Return a port at which rank 0 can serve. Not of the range that outgoing connections are given: it must
    be free a moment later, too."""
    listening = ListenAddress.from_environment(os.environ)
    if listening.ports:
        with listening.open("") as found:
            return int(found.getsockname()[1])
    for port in random.SystemRandom().sample(DERIVED_PORTS, 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise ResourceError(
        f"no port from {DERIVED_PORTS.start} to {DERIVED_PORTS.stop - 1} is free",
        remedy="end what listens there, or choose one with --master-port",
    )
