"""A local disk: files and folders are flushed to it, and a rename makes a small file appear at once.

Large files go past the page cache where the file system allows it (O_DIRECT): the disk reads the buffer
itself, which costs a tenth of the processor time of a buffered write and leaves the cache to the training
data.

The folder may come from elsewhere. A version is a real folder and a file a regular file: links are neither
listed nor followed, for reading, for writing or for deleting, and a pipe is not waited for. A dataset's files
may be links (`follow_links`): its checksums are in its manifest.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, final

import numpy as np

from paceline.core import atomic_file
from paceline.core.atomic_file import Octets, SystemCall, direct, sync_folder
from paceline.core.errors import PacelineError, PlatformError, ResourceError
from paceline.core.storage.storage import Storage, explained, list_error, write_error

BLOCK: Final = 4096

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_OLD: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
# Long enough that a call costs nothing beside its work, short enough that a thread of low priority is polite.
_CHUNK: Final = 4 << 20
_LOCK_SECONDS: Final = 30.0
_LOCK_PAUSE: Final = 0.005


@final
class LocalStorage(Storage):
    """Files below a folder of this machine (or of a shared file system that is mounted on it)."""

    exclusive = True

    def __init__(self, root: str, *, call: SystemCall = direct, follow_links: bool = False) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        self.url = self.root
        self._call: SystemCall = call
        self._follow_links = follow_links

    def make_folder(self, path: str) -> bool:
        full = self._full(path)
        with explained(write_error, f"the folder {full}"):
            return self._make(full)

    def put(self, path: str, data: Octets | Iterable[Octets]) -> None:
        full = self._full(path)
        with explained(write_error, f"the file {full}"):
            self._check_folder(os.path.dirname(path))
            pieces = [data] if isinstance(data, Octets) else data
            atomic_file.replace(full, pieces, call=self._call)

    def write(self, path: str, data: memoryview) -> None:
        full = self._full(path)
        try:
            self._check_folder(os.path.dirname(path))
            self._write_file(full, data)
            sync_folder(os.path.dirname(full), self._call)
        except FileExistsError as error:
            raise PlatformError(
                f"the file {full} exists already, and a checkpoint is written only once",
                remedy="let only one run at a time save to this folder",
            ) from error
        except OSError as error:
            raise write_error(f"the file {full}", error) from error

    def names(self, path: str) -> list[str]:
        try:
            self._check_folder(path)
            names = sorted(self._call(os.listdir, self._full(path)))
            if path:
                return names
            return [name for name in names if not os.path.islink(self._full(name))]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise list_error(f"the folder {self._full(path)}", error) from error

    def size(self, path: str) -> int | None:
        try:
            self._check_folder(os.path.dirname(path))
            found = self._call(os.stat, self._full(path), follow_symlinks=self._follow_links)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ENXIO, "it is not a regular file", self._full(path))
        return found.st_size

    def read_into(self, path: str, view: memoryview, offset: int = 0, *, fresh: bool = False) -> int:
        self._check_folder(os.path.dirname(path))
        flags = _OLD if self._follow_links else _OLD | os.O_NOFOLLOW
        descriptor = self._call(os.open, self._full(path), flags)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENXIO, "it is not a regular file", self._full(path))
            if fresh:
                os.posix_fadvise(descriptor, offset, len(view), os.POSIX_FADV_DONTNEED)
            done = 0
            while done < len(view):
                count = self._call(os.preadv, descriptor, [view[done : done + _CHUNK]], offset + done)
                if count == 0:
                    break
                done += count
            return done
        finally:
            self._call(os.close, descriptor)

    def remove(self, path: str, *, durable: bool = False) -> None:
        full = self._full(path)
        with explained(_remove_error, full), suppress(FileNotFoundError):
            self._check_folder(os.path.dirname(path))
            self._call(os.unlink, full)
            if durable:
                sync_folder(os.path.dirname(full), self._call)

    def remove_folder(self, path: str) -> None:
        full = self._full(path)
        with explained(_remove_error, full), suppress(FileNotFoundError):
            self._call(os.rmdir, full)

    @contextmanager
    def lock(self) -> Iterator[None]:
        path = self._full(".lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with explained(write_error, f"the file {path}"):
            descriptor = self._call(os.open, path, flags, 0o644)
        try:
            self._wait_for_lock(descriptor, path)
            yield
        finally:
            # Given back by name: a process forked meanwhile holds a copy of the descriptor.
            with suppress(OSError):
                self._call(fcntl.flock, descriptor, fcntl.LOCK_UN)
            self._call(os.close, descriptor)

    def _wait_for_lock(self, descriptor: int, path: str) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                self._call(fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ResourceError(
                        f"{path} has been locked by another process for {_LOCK_SECONDS:.0f} s",
                        remedy="see which process tags or deletes checkpoints here (`fuser` names it)",
                    ) from None
                time.sleep(_LOCK_PAUSE)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                    raise write_error(f"the lock {path}", error) from error
                # A file system without locks: the checks before and after are all there is.
                return

    def _check_folder(self, path: str) -> None:
        """Raise NotADirectoryError where a folder below the root is a link: what is behind it is not ours."""
        if path and not stat.S_ISDIR(os.lstat(self._full(path)).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is a link, not a folder", self._full(path))

    def _full(self, path: str) -> str:
        return os.path.join(self.root, path) if path else self.root

    def _make(self, full: str) -> bool:
        try:
            self._call(os.mkdir, full, 0o755)
        except FileExistsError:
            return False
        except FileNotFoundError:
            parent = os.path.dirname(full)
            if parent == full:
                raise
            self._make(parent)
            return self._make(full)
        sync_folder(os.path.dirname(full), self._call)
        return True

    def _write_file(self, full: str, data: memoryview) -> None:
        descriptor = self._call(os.open, full, _NEW, 0o644)
        try:
            try:
                self._write_all(descriptor, data)
                self._call(os.fsync, descriptor)
            finally:
                self._call(os.close, descriptor)
        except BaseException:
            with suppress(OSError):  # already failing: the first error is the one to report
                self._call(os.unlink, full)
            raise

    def _write_all(self, descriptor: int, data: memoryview) -> None:
        blocks = len(data) // BLOCK * BLOCK
        past_the_cache = blocks >= _CHUNK and _is_aligned(data) and self._past_the_cache(descriptor)
        done = 0
        while done < len(data):
            if past_the_cache and done >= blocks:
                past_the_cache = self._back_to_cache(descriptor)
            end = blocks if past_the_cache else len(data)
            try:
                written = self._call(os.write, descriptor, data[done : min(done + _CHUNK, end)])
            except OSError as error:
                if not past_the_cache or error.errno != errno.EINVAL:
                    raise
                # Some file systems accept the flag and refuse the write.
                past_the_cache = self._back_to_cache(descriptor)
                continue
            done += written
            if past_the_cache and written % BLOCK:
                past_the_cache = self._back_to_cache(descriptor)

    def _past_the_cache(self, descriptor: int) -> bool:
        """Let the disk read the buffers itself; False when the file system cannot."""
        try:
            self._call(fcntl.fcntl, descriptor, fcntl.F_SETFL, os.O_DIRECT)
        except OSError:
            return False
        return True

    def _back_to_cache(self, descriptor: int) -> bool:
        self._call(fcntl.fcntl, descriptor, fcntl.F_SETFL, 0)
        return False


def _is_aligned(data: memoryview) -> bool:
    return bool(np.frombuffer(data, dtype=np.uint8).ctypes.data % BLOCK == 0)


def _remove_error(full: str, error: Exception) -> PacelineError:
    return PlatformError(
        f"{full} cannot be deleted: {getattr(error, 'strerror', error)}",
        remedy="check that its folder may be written to and that nothing else puts files there",
    )
