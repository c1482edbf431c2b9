"""A folder of files by URL: a local path, or anything that fsspec knows (file, memory, s3, ...).

Local files are read with plain system calls and written so that they survive a power cut. Must not know what
the files hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import fsspec

from paceline.core.errors import UnavailableError, UsageError

_CHUNK = 8 << 20


@final
@dataclass(frozen=True)
class Folder:
    """A folder at `url`. Reading raises OSError; what is missing is FileNotFoundError."""

    url: str

    @staticmethod
    def at(url: str | os.PathLike[str]) -> Folder:
        text = os.fspath(url)
        if not text:
            raise UsageError("the URL of a checked dataset is empty", remedy="pass a folder or a URL")
        folder = Folder(text.rstrip("/") or "/")
        _ = folder._root
        return folder

    @cached_property
    def _root(self) -> tuple[Any, str]:
        """The file system (None: the local one) and the folder's path in it."""
        if "://" not in self.url:
            return None, str(Path(self.url).absolute())
        try:
            system, path = fsspec.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UnavailableError(
                f"{self.url} cannot be opened: {error}",
                remedy="install the fsspec package of that protocol (s3fs for s3://), or use another URL",
            ) from error
        return (None if self.url.startswith(("file://", "local://")) else system), path.rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return Folder, (self.url,)

    def size(self, name: str) -> int:
        system, root = self._root
        if system is None:
            return os.stat(f"{root}/{name}").st_size
        return int(system.info(f"{root}/{name}")["size"])

    def exists(self, name: str) -> bool:
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, start: int, length: int, *, fresh: bool = False) -> bytearray:
        """`length` bytes from `start`, or fewer where the file ends. `fresh`: not from a cache."""
        system, root = self._root
        if system is not None:
            if fresh:
                system.invalidate_cache()
            return bytearray(system.cat_file(f"{root}/{name}", start=start, end=start + length))
        data = bytearray(length)
        descriptor = os.open(f"{root}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if fresh:
                os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_DONTNEED)
            done = _read_into(descriptor, memoryview(data), start)
        finally:
            os.close(descriptor)
        return data if done == length else data[:done]

    def read_all(self, name: str, *, fresh: bool = False) -> bytearray:
        return self.read(name, 0, self.size(name), fresh=fresh)

    def chunks(self, name: str) -> Iterator[bytearray]:
        size = self.size(name)
        for start in range(0, size, _CHUNK):
            yield self.read(name, start, min(_CHUNK, size - start))

    def write(self, name: str, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Puts a whole file in place at once: under another name first where renaming is atomic."""
        system, root = self._root
        if system is not None:
            system.makedirs(root, exist_ok=True)
            with system.open(f"{root}/{name}", "wb") as file:
                for piece in pieces:
                    file.write(piece)
            return
        Path(root).mkdir(parents=True, exist_ok=True)
        temporary = f"{root}/.{name}.{os.getpid()}.part"
        try:
            with open(temporary, "wb") as file:
                for piece in pieces:
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, f"{root}/{name}")
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        _sync_folder(root)


def _read_into(descriptor: int, view: memoryview, start: int) -> int:
    done = 0
    while done < len(view):
        # One call moves at most 2 GiB.
        step = os.preadv(descriptor, [view[done:]], start + done)
        if step == 0:
            break
        done += step
    return done


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
