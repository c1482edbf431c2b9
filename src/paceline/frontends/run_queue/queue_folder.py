"""The queue on disk, shared by the server and by any number of commands.

    queue.json   all runs, with a checksum; replaced as a whole, durably
    lock         held while queue.json is read, changed and written
    server.lock  held by the server for as long as it serves
    server.log   what a server in the background wrote
    wake         a pipe by which the server is told to look again
    runs/7/      of run 7: log (what it printed); of its second start alive-2 (locked by its process and by
                 the parent of that) and exit-2 (the exit code)

A queue holds commands that are run with the rights of its owner: it must belong to this user, and no other
user may write to it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, final

import msgspec

from paceline.checkpoint.checksummed_json import BrokenDocument, decode_document, encode_document
from paceline.core import atomic_file, untrusted
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.errors import PlatformError, UsageError
from paceline.core.user_state import state_folder
from paceline.frontends.run_queue.queued_run import QueueContent
from paceline.train.state import run_lock

VARIABLE: Final = "PACELINE_QUEUE"
_FORMAT: Final = 1
_MOST_BYTES: Final = 1 << 30
_LOCK_SECONDS: Final = 30.0
_LOCK_PAUSE: Final = 0.01


@final
class QueueFolder:
    """The folder of a queue. Make it with `at`."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        self.file = path / "queue.json"
        self.lock_file = path / "lock"
        self.server_lock = path / "server.lock"
        self.server_log = path / "server.log"
        self.wake_pipe = path / "wake"
        self._clock = clock or MonotonicClock()
        self._known: tuple[tuple[int, int, int], QueueContent] | None = None  # a version, and what it holds

    @staticmethod
    def at(given: str | None) -> QueueFolder:
        """Return the folder that is given, else that of PACELINE_QUEUE, else the user's own; made where there
        is none."""
        chosen = given or os.environ.get(VARIABLE)
        path = Path(chosen).expanduser().absolute() if chosen else state_folder() / "queue"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PlatformError(
                f"the queue {path} cannot be made: {error.strerror}",
                remedy=f"check the path and its permissions, or choose another place: --queue or {VARIABLE}",
            ) from error
        folder = QueueFolder(path)
        folder.check_owner()
        return folder

    def check_owner(self) -> None:
        """Refuse a queue in which others could write commands."""
        for path in (self.path, self.file):
            if not os.path.lexists(path):
                continue
            if not untrusted.is_owned_by_user(path):
                raise UsageError(
                    f"the queue {self.path} belongs to another user: {path}",
                    remedy="its commands would be run with your rights: choose a queue of your own with "
                    f"--queue or {VARIABLE}, or run the command as its owner",
                )
            if stat.S_IMODE(os.lstat(path).st_mode) & 0o022:
                raise UsageError(
                    f"other users may write to {path}, and commands in it are run with your rights",
                    remedy=f"take that away: chmod go-w {path}",
                )

    def read(self) -> QueueContent:
        """Return the queue as it is now; no run where it is new."""
        try:
            found = os.stat(self.file)
            # Each change makes a new file.
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
            if self._known is None or self._known[0] != version:
                self._known = (version, self._decoded())
            return self._known[1]
        except FileNotFoundError:
            return QueueContent()
        except OSError as error:
            raise PlatformError(
                f"{self.file} cannot be read: {error.strerror}", remedy="check its permissions and its disk"
            ) from error

    def _decoded(self) -> QueueContent:
        try:
            body = decode_document(untrusted.read_regular(self.file, _MOST_BYTES))
            if body.pop("format", None) != _FORMAT:
                raise BrokenDocument("has a format that this version of Paceline does not know")
            return msgspec.convert(body, QueueContent)
        except (BrokenDocument, msgspec.ValidationError) as error:
            raise PlatformError(
                f"the queue's file {self.file} {error}",
                remedy="bring a copy of it back, or move it away and add the runs again with --run-dir: "
                f"{self.server_log} names their folders, and each continues from what it saved",
            ) from error

    def change(self, change: Callable[[QueueContent], QueueContent]) -> QueueContent:
        """Replace the content by what `change` makes of it, while no other process can; return it. Nothing is
        written where nothing changes, or where `change` raises."""
        with self.locked():
            before = self.read()
            after = change(before)
            if after != before:
                self._write(after)
            return after

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the content."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritable(self.lock_file, error) from error
        try:
            self._lock(descriptor)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        until = self._clock.now() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._clock.now() > until:
                    raise PlatformError(
                        f"another command has held {self.lock_file} for {_LOCK_SECONDS:.0f} s",
                        remedy=f"see which process it is (fuser {self.lock_file}), and whether it is halted",
                    ) from None
                self._clock.sleep(_LOCK_PAUSE)
            except OSError as error:
                raise PlatformError(
                    f"{self.lock_file} cannot be locked: {error.strerror}",
                    remedy="put the queue on a file system that has locks: --queue",
                ) from error

    def _write(self, content: QueueContent) -> None:
        body = {"format": _FORMAT, **msgspec.to_builtins(content)}
        try:
            atomic_file.replace(self.file, [encode_document(body)], mode=0o600, durable=True)
        except OSError as error:
            raise self._unwritable(self.file, error) from error

    def _unwritable(self, path: Path, error: OSError) -> PlatformError:
        return PlatformError(
            f"{path} cannot be written: {error.strerror}; the queue stays as it was",
            remedy="free space on its disk, or check the permissions of the folder",
        )

    # the server

    @property
    def is_served(self) -> bool:
        """Whether a server works on this queue now."""
        return run_lock.is_held(self.server_lock)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Hold the lock of the server; UsageError where another one does."""
        with ExitStack() as closing:
            try:
                closing.enter_context(run_lock.held(self.server_lock, f"the queue {self.path}"))
            except UsageError as error:
                raise UsageError(
                    error.message,
                    remedy="one server is enough: see `paceline queue ls`; SIGTERM ends it, and its runs "
                    "train on",
                ) from None
            with suppress(OSError):  # it is there, or the file system has no pipes
                os.mkfifo(self.wake_pipe, 0o600)
            yield

    def wake(self) -> None:
        """Have the server look again, if there is one."""
        with suppress(OSError):  # ENXIO: no process reads; EAGAIN: enough is written already
            descriptor = os.open(self.wake_pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"\n")
            finally:
                os.close(descriptor)

    # a run

    def folder_of(self, number: int) -> Path:
        return self.path / "runs" / str(number)

    def log_of(self, number: int) -> Path:
        return self.folder_of(number) / "log"

    def alive_file_of(self, number: int, attempt: int) -> Path:
        return self.folder_of(number) / f"alive-{attempt}"

    def exit_file_of(self, number: int, attempt: int) -> Path:
        return self.folder_of(number) / f"exit-{attempt}"


@final
class WakeUps:
    """The reading end of the pipe by which commands and ended runs wake the server."""

    def __init__(self, folder: QueueFolder) -> None:
        try:
            # Both ends: with the last writer gone the pipe would count as ended.
            self._pipe = os.open(folder.wake_pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ENOENT:
                self._pipe = -1  # a file system without pipes: the server looks by itself
            else:
                raise PlatformError(
                    f"{folder.wake_pipe} cannot be opened: {error.strerror}", remedy="delete it"
                ) from error

    def wait(self, seconds: float, *others: int) -> None:
        """Wait until someone calls, one of these descriptors can be read, or the time is over."""
        poll = select.poll()
        for descriptor in (self._pipe, *others):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
        with suppress(OSError):
            os.read(self._pipe, 1 << 16)

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
