"""Any fsspec file system: S3 and other object stores, memory, servers.

An object store makes an object appear whole when its upload ends, so `put` needs no rename and there are no
folders to flush. Nothing can be locked.
"""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, final

from paceline.core.atomic_file import Octets, SystemCall
from paceline.core.errors import PacelineError, PlatformError, UnavailableError, UsageError
from paceline.core.storage.storage import Storage, explained, list_error, write_error
from paceline.core.untrusted import redact_credentials

# Also the size of the parts of a multipart upload, of which S3 allows ten thousand: files of up to 320 GB.
_CHUNK: Final = 32 << 20
_NOT_THERE: Final = (404, 410)  # HTTP: not found, gone


def open_remote(url: str, *, call: SystemCall) -> Storage:
    """Return the storage behind an fsspec URL; an error names the package that is missing."""
    import fsspec

    named = redact_credentials(url)
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UnavailableError(
            f"{named} needs a package that is not installed: {error}",
            remedy="install the fsspec package for this kind of URL (s3fs for s3://)",
        ) from error
    except ValueError as error:
        why = redact_credentials(str(error))
        raise UsageError(f"{named} is not a URL that fsspec knows: {why}", remedy="check the URL") from None
    except OSError as error:
        reason = redact_credentials(str(error).partition("\n")[0])
        raise UnavailableError(
            f"{named} cannot be reached from here: {reason}", remedy="check what this kind of URL needs"
        ) from None
    return FsspecStorage(filesystem, root, url, call=call)


@final
class FsspecStorage(Storage):
    """Files below a folder of an fsspec file system."""

    exclusive = False

    def __init__(self, filesystem: Any, root: str, url: str, *, call: SystemCall) -> None:
        self.url = redact_credentials(url)  # for messages; the file system has the key
        self._files = filesystem
        self._root = root.rstrip("/")
        self._call: SystemCall = call

    def make_folder(self, path: str) -> bool:
        # An object store has no folders to make; a server's file system has, and needs them.
        with explained(write_error, f"the folder {self._shown(path)}", Exception):
            self._call(self._files.makedirs, self._full(path), exist_ok=True)
        return True

    def put(self, path: str, data: Octets | Iterable[Octets]) -> None:
        with explained(write_error, self._shown(path), Exception):
            if isinstance(data, Octets):
                self._call(self._files.pipe_file, self._full(path), bytes(data))
            else:
                self._upload(path, data)

    def write(self, path: str, data: memoryview) -> None:
        try:
            self._upload(path, (data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)))
        except Exception as error:
            with suppress(Exception):
                self._call(self._files.rm_file, self._full(path))
            raise write_error(self._shown(path), error) from error

    def names(self, path: str) -> list[str]:
        full = self._full(path)
        try:
            self._files.invalidate_cache()
            found = self._call(self._files.ls, full, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:
            raise list_error(self._shown(path), error) from error
        names = {posixpath.basename(str(name).rstrip("/")) for name in found}
        # A folder may list itself, as an object.
        return sorted(names - {"", posixpath.basename(full)})

    def size(self, path: str) -> int | None:
        try:
            self._files.invalidate_cache()
            facts = self._call(self._files.info, self._full(path))
        except (FileNotFoundError, NotADirectoryError) as error:
            if (refusal := _refused(error)) is not None:
                raise _read_error(refusal) from error
            return None
        except Exception as error:
            raise _read_error(error) from error
        return int(facts["size"]) if facts.get("type") == "file" else None

    def read_into(self, path: str, view: memoryview, offset: int = 0, *, fresh: bool = False) -> int:
        if fresh:
            self._files.invalidate_cache()
        done = 0
        while done < len(view):
            end = min(done + _CHUNK, len(view))
            data = self._read_range(path, offset + done, offset + end)
            view[done : done + len(data)] = data
            done += len(data)
            if len(data) == 0 or done < end:
                break
        return done

    def remove(self, path: str, *, durable: bool = False) -> None:
        with explained(_remove_error, self._shown(path), Exception), suppress(FileNotFoundError):
            self._call(self._files.rm_file, self._full(path))

    def remove_folder(self, path: str) -> None:
        try:
            self._call(self._files.rmdir, self._full(path))
        except FileNotFoundError:
            return
        except Exception as error:
            # Object stores have no folders: nothing is there to be deleted, whatever the attempt raised.
            if self.names(path):
                raise _remove_error(self._shown(path), error) from error

    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _upload(self, path: str, pieces: Iterable[Octets]) -> None:
        file = self._call(self._files.open, self._full(path), "wb", block_size=_CHUNK)
        try:
            for piece in pieces:
                self._call(file.write, piece)
            self._call(file.close)
        except BaseException:
            # Without this the file object would finish the upload when it is collected.
            with suppress(Exception):
                self._call(file.discard)
            with suppress(AttributeError):
                file.closed = True
            raise

    def _read_range(self, path: str, start: int, stop: int) -> bytes:
        try:
            data: bytes = self._call(self._files.cat_file, self._full(path), start=start, end=stop)
        except OSError as error:
            # "The range asked for is behind the end" is an empty read.
            if error.errno == errno.EINVAL and "range" in str(error).lower():
                return b""
            raise
        except Exception as error:
            raise _read_error(error) from error
        return data

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _shown(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/{path}"


def _refused(error: OSError) -> Exception | None:
    """Return the error behind a "not found" that is none: fsspec raises FileNotFoundError for every HTTP
    answer but a good one, and for a server that cannot be reached."""
    cause = error.__cause__
    if isinstance(getattr(cause, "status", None), int):
        found = cause if getattr(cause, "status", 0) not in _NOT_THERE else None
        return found if isinstance(found, Exception) else None
    return cause if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) else None


def _read_error(error: Exception) -> OSError:
    """Return an OSError for an error of any kind of the packages below: readers of files catch OSError."""
    code = errno.EACCES if isinstance(error, PermissionError) else errno.EIO
    return OSError(code, f"{os.strerror(code)} ({type(error).__name__}: {error})")


def _remove_error(what: str, error: Exception) -> PacelineError:
    return PlatformError(
        f"{what} cannot be deleted: {error}", remedy="check that the key that is used may delete there"
    )
