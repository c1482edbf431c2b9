"""Where checkpoint files live: the few things done to files, on a local disk or behind any fsspec URL.

Paths are relative to the storage's root and use "/". Every call into the operating system or into fsspec goes
through one function, `call(operation, *arguments)`, so that a test can count the calls and end the process at
any of them. Must not know what is in the files.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ParamSpec, Protocol, TypeVar

from paceline.core.errors import PacelineError, PlatformError, ResourceError, UsageError
from paceline.core.foreign import without_credentials

P = ParamSpec("P")
T = TypeVar("T")

# A file that is being put has this behind its name until it is whole.
TEMPORARY = ".tmp"

_LARGEST_DOCUMENT = 256 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Call(Protocol):
    """How a storage calls the outside."""

    def __call__(self, operation: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


def direct(operation: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The plain call."""
    return operation(*args, **kwargs)


class Storage(ABC):
    """Files below one root. What `put` and `write` return from is durable; reading never creates anything.

    Writing raises PacelineErrors that name the file; reading raises OSError, because for a reader an
    unreadable file is a finding, not a failure.
    """

    url: str
    exclusive: bool  # whether `make_folder` tells two that make the same folder at once apart

    @abstractmethod
    def make_folder(self, path: str) -> bool:
        """Make a folder and what is above it; False when it was there already."""

    @abstractmethod
    def put(self, path: str, data: bytes | memoryview) -> None:
        """A file, all of it or nothing: a reader sees the old content or the new one."""

    @abstractmethod
    def write(self, path: str, data: memoryview) -> None:
        """A new large file, not atomic: what was written is removed again when it fails."""

    @abstractmethod
    def names(self, path: str) -> list[str]:
        """Names of the files and folders in a folder, sorted; none when it does not exist.

        A folder that cannot be listed is a PlatformError: without names there is nothing to find.
        """

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Bytes of a file; None when there is no such file."""

    @abstractmethod
    def read_into(self, path: str, view: memoryview, offset: int = 0) -> int:
        """Fill `view` with the file from `offset` on; fewer bytes are returned only at the file's end."""

    @abstractmethod
    def remove(self, path: str, *, durable: bool = False) -> None:
        """Delete a file; with `durable` it stays deleted after a power cut. No error when there is none."""

    @abstractmethod
    def remove_folder(self, path: str) -> None:
        """Delete a folder that is empty; no error when there is none."""

    @abstractmethod
    def lock(self) -> AbstractContextManager[None]:
        """Only one process at a time is inside, where the storage can do that (a local disk can)."""

    def read(self, path: str) -> bytes:
        """A whole small file; FileNotFoundError when there is none."""
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if size > _LARGEST_DOCUMENT:
            # The folder may come from elsewhere, and a file with a hole costs its maker nothing.
            raise OSError(errno.EFBIG, f"it has {size} bytes, and {_LARGEST_DOCUMENT} are the most", path)
        buffer = bytearray(size)
        return bytes(buffer[: self.read_into(path, memoryview(buffer))])


def open_storage(url: str | os.PathLike[str], *, call: Call | None = None) -> Storage:
    """The storage behind a path or an fsspec URL (`file://`, `memory://`, `s3://bucket/folder`, ...)."""
    text = os.fspath(url)
    if not text:
        raise UsageError(
            "a checkpoint folder has no name", remedy="give a path or a URL such as s3://bucket/run"
        )
    caller = direct if call is None else call
    scheme, separator, rest = text.partition("://")
    if not separator or scheme in ("file", "local"):
        from paceline.checkpoint.local import LocalStorage

        return LocalStorage(rest if separator else text, call=caller)
    from paceline.checkpoint.remote import open_remote

    return open_remote(text, call=caller)


def list_error(what: str, error: Exception) -> PacelineError:
    """What to raise when the names in `what` cannot be had."""
    reason = without_credentials(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
    return PlatformError(
        f"{what} cannot be listed: {reason}",
        remedy="check that it may be read, that its server answers, and the key that is used",
    )


def write_error(what: str, error: Exception) -> PacelineError:
    """What to raise when `what` could not be written: a full disk is a resource, all else the platform."""
    code = getattr(error, "errno", None)
    reason = without_credentials(getattr(error, "strerror", None) or f"{type(error).__name__}: {error}")
    if code in _FULL:
        return ResourceError(
            f"{what} cannot be written: {reason}",
            remedy="free space there, keep fewer checkpoints, or put the checkpoints elsewhere",
            errno=code,
        )
    return PlatformError(
        f"{what} cannot be written: {reason}",
        remedy="check that the folder or bucket exists and may be written to, and that its server answers",
        errno=code,
    )
