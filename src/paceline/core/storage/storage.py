"""Storage interface: operations on files, on a local disk or behind any fsspec URL.

Paths are relative to the storage's root and use "/". Every call into the operating system or into fsspec goes
through one function (`atomic_file.SystemCall`), so that a test can count the calls and end the process at any
of them.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from paceline.core.atomic_file import Octets
from paceline.core.errors import PacelineError, PlatformError, ResourceError
from paceline.core.untrusted import redact_credentials

_LARGEST_DOCUMENT = 256 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Storage(ABC):
    """Files below one root. What `put` and `write` return from is durable; reading never creates anything.

    Writing raises PacelineErrors that name the file; reading raises OSError, because for a reader an
    unreadable file is a finding, not a failure.
    """

    url: str
    exclusive: bool  # of two processes that make one folder at once, `make_folder` is True for one

    @abstractmethod
    def make_folder(self, path: str) -> bool:
        """Make a folder and what is above it; False when it was there already."""

    @abstractmethod
    def put(self, path: str, data: Octets | Iterable[Octets]) -> None:
        """Replace a file atomically, by bytes or by pieces of bytes."""

    @abstractmethod
    def write(self, path: str, data: memoryview) -> None:
        """Write a new large file, not atomically: it is removed again where writing fails."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Return the names of the files and folders in a folder, sorted; none when it does not exist.

        A folder that cannot be listed is a PlatformError: without names there is nothing to find.
        """

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the bytes that a file has; None when there is no such file."""

    @abstractmethod
    def read_into(self, path: str, view: memoryview, offset: int = 0, *, fresh: bool = False) -> int:
        """Fill `view` with the file from `offset` on, and return how many bytes there were: fewer only at the
        file's end. `fresh`: not from a cache."""

    @abstractmethod
    def remove(self, path: str, *, durable: bool = False) -> None:
        """Delete a file; with `durable` it stays deleted after a power cut. No error when there is none."""

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """Delete a folder that is empty; no error when there is none."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Hold a lock that one process at a time has, where the storage can lock (a local disk can)."""

    def read(self, path: str, *, fresh: bool = False) -> bytes:
        """Return a small file; FileNotFoundError when there is none."""
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if size > _LARGEST_DOCUMENT:
            # The folder may come from elsewhere, and a file with a hole costs its maker nothing.
            raise OSError(errno.EFBIG, f"it has {size} bytes, and {_LARGEST_DOCUMENT} are the most", path)
        return bytes(self.read_range(path, 0, size, fresh=fresh))

    def read_range(self, path: str, start: int, length: int, *, fresh: bool = False) -> bytearray:
        """Return `length` bytes from `start` on, or fewer where the file ends."""
        data = bytearray(length)
        done = self.read_into(path, memoryview(data), start, fresh=fresh)
        return data if done == length else data[:done]


@contextmanager
def explained(
    make: Callable[[str, Exception], PacelineError], what: str, kind: type[Exception] = OSError
) -> Iterator[None]:
    """Raise `make(what, error)` for an error of this kind; fsspec raises any."""
    try:
        yield
    except kind as error:
        raise make(what, error) from error


def list_error(what: str, error: Exception) -> PacelineError:
    """Return the error for a folder `what` that cannot be listed."""
    reason = redact_credentials(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
    return PlatformError(
        f"{what} cannot be listed: {reason}",
        remedy="check that it may be read, that its server answers, and the key that is used",
    )


def write_error(what: str, error: Exception) -> PacelineError:
    """Return the error for a file that cannot be written: a full disk is a resource, else the platform."""
    code = getattr(error, "errno", None)
    reason = redact_credentials(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
    if code in _FULL:
        return ResourceError(
            f"{what} cannot be written: {reason}",
            remedy="free space there, keep fewer checkpoints, or write elsewhere",
            errno=code,
        )
    return PlatformError(
        f"{what} cannot be written: {reason}",
        remedy="check that the folder or bucket exists and may be written to, and that its server answers",
        errno=code,
    )
