"""Identify this host, for people and to decide which processes can share memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

# Ranks with different values count as being on different hosts: containers and tests set it where the kernel
# cannot tell them apart.
_VARIABLE: Final = "PACELINE_HOST"


def host_identity(environment: Mapping[str, str] = os.environ) -> str:
    """Return a text that is equal for two processes that can share memory: same kernel, same network and same
    process numbers."""
    parts = [environment.get(_VARIABLE, "")]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts.append(file.read().strip())
        parts += [str(os.stat(f"/proc/self/ns/{kind}").st_ino) for kind in ("net", "pid")]
    except OSError:
        parts.append(socket.gethostname())
    return "|".join(parts)


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the machine's name for people."""
    return environment.get(_VARIABLE) or socket.gethostname()
