"""Write a file in one step: a reader sees the old content or the new one, never a part of it.

The content goes to a temporary file beside the target and gets its name by a rename, or by a link where an
existing file must win. For a durable file the order is: content flushed, renamed, folder flushed. After a
power cut the name then leads to the old content or to all of the new one. Every call into the operating
system goes through one function, `call(operation, *arguments)`, so that a test can count the calls and end
the process at any of them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, ParamSpec, Protocol, TypeVar

from paceline.core.errors import PlatformError

P = ParamSpec("P")
T = TypeVar("T")
Octets = bytes | bytearray | memoryview

TEMPORARY: Final = ".tmp"
"""Ends the name of a file that is not complete yet."""

# O_EXCL: a link or a file of another mode under the temporary name is not written to.
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_CHUNK: Final = 4 << 20


class SystemCall(Protocol):
    """Function that makes a call into the operating system or into fsspec."""

    def __call__(self, operation: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...


def direct(operation: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Make the call."""
    return operation(*args, **kwargs)


def replace_file(path: Path, data: bytes, *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace a small file of a run's folder, and make its folder where there is none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, [data], mode=mode, durable=durable)
    except OSError as error:
        raise PlatformError(
            f"{path} cannot be written: {error.strerror}",
            remedy="free space on its disk, or put the run's folder where it can be written",
        ) from error


def replace(
    path: str | Path,
    pieces: Iterable[Octets],
    *,
    mode: int = 0o644,
    durable: bool = True,
    call: SystemCall = direct,
) -> None:
    """Replace a file by the concatenation of `pieces`; OSError, and no temporary file, where that fails.

    One process at a time may replace a file: the temporary name is fixed, so that a killed writer leaves at
    most one temporary file and its successor removes it.
    """
    temporary = f"{path}{TEMPORARY}"
    try:
        descriptor = call(os.open, temporary, _NEW, mode)
    except FileExistsError:
        if not stat.S_ISREG(os.lstat(temporary).st_mode):
            raise  # a link, that leads elsewhere: not made by this function
        call(os.unlink, temporary)  # left by a process that was killed
        descriptor = call(os.open, temporary, _NEW, mode)
    try:
        try:
            for piece in pieces:
                _write_all(descriptor, memoryview(piece), call)
            if durable:
                call(os.fsync, descriptor)
        finally:
            call(os.close, descriptor)
        call(os.rename, temporary, path)
    except BaseException:
        with suppress(OSError):
            call(os.unlink, temporary)
        raise
    if durable:
        sync_folder(os.path.dirname(path), call)


def create_once(path: Path, data: bytes, *, mode: int) -> None:
    """Create a file that is never replaced: of several processes, the first one's content stays."""
    temporary = f"{path}.{os.getpid()}.{secrets.token_hex(4)}"
    replace(temporary, [data], mode=mode, durable=False)
    try:
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def sync_folder(folder: str, call: SystemCall = direct) -> None:
    """Make the names in a folder durable."""
    descriptor = call(os.open, folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        call(os.fsync, descriptor)
    except OSError as error:
        # Some network file systems have nothing to flush for a folder.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        call(os.close, descriptor)


def _write_all(descriptor: int, data: memoryview, call: SystemCall) -> None:
    done = 0
    while done < len(data):
        done += call(os.write, descriptor, data[done : done + _CHUNK])
