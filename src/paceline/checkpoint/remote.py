"""Any fsspec file system: S3 and other object stores, memory, servers.

An object store makes an object appear whole when its upload ends, so `put` needs no rename and there are no
folders to flush. Nothing can be locked. Must not know what is in the files.
"""

from __future__ import annotations

import errno
import os
import posixpath
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, final

from paceline.checkpoint.storage import Call, Storage, list_error, write_error
from paceline.core.errors import PacelineError, PlatformError, UnavailableError, UsageError
from paceline.core.foreign import without_credentials

# Also the size of the parts of a multipart upload, of which S3 allows ten thousand: files of up to 320 GB.
_CHUNK: Final = 32 << 20
_NOT_THERE: Final = (404, 410)  # HTTP: not found, gone


def open_remote(url: str, *, call: Call) -> Storage:
    """The storage behind an fsspec URL; what fsspec cannot do is said with the package that is missing."""
    import fsspec

    named = without_credentials(url)
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UnavailableError(
            f"{named} needs a package that is not installed: {error}",
            remedy="install the fsspec package for this kind of URL (s3fs for s3://)",
        ) from error
    except ValueError as error:
        why = without_credentials(str(error))
        raise UsageError(f"{named} is not a URL that fsspec knows: {why}", remedy="check the URL") from None
    except OSError as error:
        reason = without_credentials(str(error).partition("\n")[0])
        raise UnavailableError(
            f"{named} cannot be reached from here: {reason}", remedy="check what this kind of URL needs"
        ) from None
    return FsspecStorage(filesystem, root, url, call=call)


@final
class FsspecStorage(Storage):
    """Files below a folder of an fsspec file system."""

    exclusive = False

    def __init__(self, filesystem: Any, root: str, url: str, *, call: Call) -> None:
        self.url = without_credentials(url)  # for messages; the file system has the key
        self._files = filesystem
        self._root = root.rstrip("/")
        self._call: Call = call

    def make_folder(self, path: str) -> bool:
        # An object store has no folders to make; a server's file system has, and needs them.
        try:
            self._call(self._files.makedirs, self._full(path), exist_ok=True)
        except Exception as error:
            raise write_error(f"the folder {self._shown(path)}", error) from error
        return True

    def put(self, path: str, data: bytes | memoryview) -> None:
        try:
            self._call(self._files.pipe_file, self._full(path), bytes(data))
        except Exception as error:
            raise write_error(self._shown(path), error) from error

    def write(self, path: str, data: memoryview) -> None:
        full = self._full(path)
        try:
            file = self._call(self._files.open, full, "wb", block_size=_CHUNK)
            try:
                for start in range(0, len(data), _CHUNK):
                    self._call(file.write, data[start : start + _CHUNK])
                self._call(file.close)
            except BaseException:
                self._abandon(file)
                raise
        except Exception as error:
            with suppress(Exception):
                self._call(self._files.rm_file, full)
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
        # A folder may list itself, as an object of its own name.
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

    def read_into(self, path: str, view: memoryview, offset: int = 0) -> int:
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
        try:
            self._call(self._files.rm_file, self._full(path))
        except FileNotFoundError:
            return
        except Exception as error:
            raise _remove_error(self._shown(path), error) from error

    def remove_folder(self, path: str) -> None:
        try:
            self._call(self._files.rmdir, self._full(path))
        except FileNotFoundError:
            return
        except Exception as error:
            # Object stores have no folders: nothing is there to be deleted, whatever they say to the attempt.
            if self.names(path):
                raise _remove_error(self._shown(path), error) from error

    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _abandon(self, file: Any) -> None:
        """Give up an upload: without this, the file object would finish it when it is collected."""
        with suppress(Exception):
            self._call(file.discard)
        with suppress(AttributeError):
            file.closed = True

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
    """What is behind a "not found" that is none: fsspec says so of every HTTP answer but a good one, and of a
    server that cannot be reached."""
    cause = error.__cause__
    if isinstance(getattr(cause, "status", None), int):
        found = cause if getattr(cause, "status", 0) not in _NOT_THERE else None
        return found if isinstance(found, Exception) else None
    return cause if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError) else None


def _read_error(error: Exception) -> OSError:
    """What the packages below raise is of any kind; a reader knows one."""
    code = errno.EACCES if isinstance(error, PermissionError) else errno.EIO
    return OSError(code, f"{os.strerror(code)} ({type(error).__name__}: {error})")


def _remove_error(what: str, error: Exception) -> PacelineError:
    return PlatformError(
        f"{what} cannot be deleted: {error}", remedy="check that the key that is used may delete there"
    )
