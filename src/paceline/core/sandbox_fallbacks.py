"""Linux calls that a sandbox may forbid (a container's seccomp profile, an old kernel): another way where
there is one, else an error that names the call and the profile.
"""

from __future__ import annotations

import errno
import os
import tempfile
from typing import Final

from paceline.core.errors import ResourceError, UnavailableError

# What a call gets that a sandbox or the kernel does not let through, by any of these codes.
_FORBIDDEN: Final = (errno.EPERM, errno.ENOSYS, errno.EACCES)
_SHARED: Final = "/dev/shm"


def open_process(pid: int) -> int:
    """Return a descriptor that is readable once the process has ended; ProcessLookupError where it is
    gone."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        raise UnavailableError(
            f"the system call pidfd_open is not allowed here ({error.strerror}), and workers cannot be "
            "watched without it",
            remedy="it needs Linux 5.3 and a container whose seccomp profile allows it: update the container "
            "runtime, or start with a profile that has it (docker run --security-opt seccomp=...)",
        ) from error


def memory_file(name: str) -> int:
    """Return a file in memory without a name, for processes that are given its descriptor.

    Where memfd_create is not allowed, an unlinked file takes its place: in /dev/shm or in the folder for
    temporary files, whichever has more room.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        if error.errno not in _FORBIDDEN:
            raise
        forbidden = error
    tried = []
    for folder in sorted({_SHARED, tempfile.gettempdir()}, key=_room, reverse=True):
        try:
            return _unlinked(folder)
        except OSError as error:
            tried.append(f"{folder}: {error.strerror}")
    raise ResourceError(
        f"the system call memfd_create is not allowed here ({forbidden.strerror}), and no file could be made "
        f"in its place ({'; '.join(tried)})",
        remedy="start the container with a seccomp profile that allows memfd_create, or give it a writable "
        "/dev/shm or TMPDIR",
    ) from forbidden


def _unlinked(folder: str) -> int:
    descriptor, path = tempfile.mkstemp(prefix="paceline-", dir=folder)
    os.unlink(path)
    return descriptor


def _room(folder: str) -> int:
    try:
        found = os.statvfs(folder)
    except OSError:
        return -1
    return found.f_bavail * found.f_frsize
