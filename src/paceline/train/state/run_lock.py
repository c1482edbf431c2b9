"""One run at a time in a folder: a lock of the operating system, held until the run ends.

The kernel gives it back when the process that holds it dies, however it dies; the file stays and means
nothing by itself. It names the holder, for the error that a second run gets.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.errors import PlatformError, UsageError

# File systems without locks: running unprotected is better than not at all.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
_TRIES, _RETRY_SECONDS = 3, 0.01


@contextmanager
def held(file: Path, what: str) -> Iterator[None]:
    """Hold a lock on `file`; raise a UsageError that names the holder where another process has it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise PlatformError(
            f"{file} cannot be written: {error.strerror}",
            remedy="check the path, its permissions and the disk's space",
        ) from error
    try:
        _lock(descriptor, file, what)
        try:
            yield
        finally:
            # Given back by name: a process forked meanwhile has a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_held(file: Path) -> bool:
    """Return whether a process holds the lock now; a file that cannot be opened is held by none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, file: Path, what: str) -> None:
    try:
        for left in reversed(range(_TRIES)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not left:
                    raise
                time.sleep(_RETRY_SECONDS)  # a process may be looking in `is_held`
    except BlockingIOError:
        raise UsageError(
            f"{what} is in use: {_holder(descriptor)} is running there (it holds {file})",
            remedy="wait until it has ended, stop it (SIGTERM), or choose another place",
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise PlatformError(
                f"{file} cannot be locked: {error.strerror}", remedy="choose a folder on another file system"
            ) from error
        return
    me = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
    with suppress(OSError):  # a full disk: the lock itself holds, only its holder stays without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, me, 0)


def _holder(descriptor: int) -> str:
    try:
        known = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(known['pid'])} on {known['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
