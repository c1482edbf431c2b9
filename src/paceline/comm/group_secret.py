"""The secret that ranks are given by hand where no supervisor gives them one: a file that
PACELINE_SECRET_FILE names.

All ranks of a group have it or none has. The store in which they meet asks for it, and the key of their
connections is made from it and from what rank 0 drew: who only reads the meeting learns neither. Knows the
file, not who uses what is in it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Mapping
from typing import Final

from paceline.core.errors import UsageError

SECRET_VARIABLE: Final = "PACELINE_SECRET_FILE"
_SIZES: Final = range(16, 4097)
_HOW: Final = "make one with `(umask 077; openssl rand -hex 32 > FILE)` and give every rank a copy"


def group_secret(environment: Mapping[str, str]) -> bytes:
    """What is in the file that the environment names; empty where it names none."""
    path = environment.get(SECRET_VARIABLE, "")
    return _read(path) if path else b""


def mesh_secret(token: bytes, drawn: bytes) -> bytes:
    """The secret of a group's connections: what rank 0 drew for it, and what the ranks were given, if any."""
    return hmac.new(token, b"paceline mesh" + drawn, hashlib.sha256).digest() if token else drawn


def _read(path: str) -> bytes:
    try:
        # Not blocking: a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise UsageError(f"{SECRET_VARIABLE}={path} cannot be read: {error}", remedy=_HOW) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{SECRET_VARIABLE}={path} is not a regular file", remedy=_HOW)
        if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"{SECRET_VARIABLE}={path} can be read or written by other users (mode "
                f"{stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid})",
                remedy=f"make it yours alone: chmod 600 {path}",
            )
        secret = os.read(descriptor, _SIZES.stop + 1).strip()
    finally:
        os.close(descriptor)
    if len(secret) not in _SIZES:
        raise UsageError(
            f"{SECRET_VARIABLE}={path} holds {len(secret)} bytes; {_SIZES.start} to {_SIZES.stop - 1} are a "
            "secret",
            remedy=_HOW,
        )
    return secret
