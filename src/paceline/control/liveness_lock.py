"""Shared lock held by every live process of a run, so that a restart can wait for those of a previous start.

    crew     locked, shared, by supervisor and workers while they live; the kernel releases it
    leave    exists while a new start waits for them: workers without a supervisor save and leave at once

The lock of the caller (`run_lock`) is free as soon as the caller is dead, while the processes that it started
may continue to train: a new start must neither write beside them nor miss their last steps.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.core.atomic_file import replace_file
from paceline.core.errors import PacelineError, PlatformError

LOCK_FILE: Final = "crew"
LEAVE_FILE: Final = "leave"
_LOCKS: Final = Path("/proc/locks")
_GRACE_SECONDS: Final = 0.5  # processes that are about to end are not reported
_POLL_SECONDS: Final = 0.05
_TRIES: Final = 20

_taken: set[int] = set()  # descriptors of this process


def acquire(folder: Path) -> int | None:
    """Take the lock. Return a descriptor, which may be passed to another process: the lock holds as long as
    any process has it open. None where locks do not work (file system, full disk): the run continues
    unprotected."""
    descriptor = _open(folder, os.O_CREAT)
    if descriptor is None:
        return None
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_SECONDS)  # a process is testing in `is_free`
        except OSError:
            break
        else:
            return descriptor
    os.close(descriptor)
    return None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the lock in this process."""
    descriptor = acquire(folder)
    if descriptor is None:
        yield
        return
    _release_in_children()
    _taken.add(descriptor)
    try:
        yield
    finally:
        _taken.discard(descriptor)
        os.close(descriptor)


@functools.cache  # once in a process, and not when this module is imported
def _release_in_children() -> None:
    os.register_at_fork(after_in_child=_release)


def _release() -> None:
    """Release the lock in a forked child: it may outlive its parent, and must not hold the parent's lock."""
    for descriptor in _taken:
        os.close(descriptor)
    _taken.clear()


def was_ever_held(folder: Path) -> bool:
    """Return whether a process ever held the lock here."""
    return (folder / LOCK_FILE).exists()


def is_leave_requested(folder: Path) -> bool:
    """Return whether the run is being started again: a worker without a supervisor need not wait for one."""
    return (folder / LEAVE_FILE).exists()


def wait_until_free(folder: Path, seconds: float, on_wait: Callable[[list[int]], None]) -> list[int] | None:
    """Ask all holders to leave, and wait for them. Return None when the lock is free, and after `seconds` the
    processes that still hold it. `on_wait` is called once with the processes that are waited for."""
    begun = time.monotonic()
    leave = folder / LEAVE_FILE
    _remove(leave)  # a start that was killed while it waited may have left it
    asked = False
    try:
        while not is_free(folder):
            waited = time.monotonic() - begun
            if waited > seconds:
                return holders(folder)
            if waited > _GRACE_SECONDS and not asked:
                asked = True
                on_wait(holders(folder))
                with contextlib.suppress(PacelineError):  # full disk: they leave without the request
                    replace_file(leave, b"")
            time.sleep(_POLL_SECONDS)
        return None
    finally:
        _remove(leave)


def _remove(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise PlatformError(
            f"{file} cannot be removed: {error.strerror}", remedy="check the permissions of the run's folder"
        ) from error


def _open(folder: Path, flags: int = 0) -> int | None:
    try:
        return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    except OSError:
        return None


def is_free(folder: Path) -> bool:
    """Return whether no process holds the lock."""
    descriptor = _open(folder)
    if descriptor is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    else:
        # Explicitly: a process forked right now has a copy of the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return True
    finally:
        os.close(descriptor)


def holders(folder: Path) -> list[int]:
    """Return the processes of this host that hold the lock, as far as /proc/locks shows them."""
    file = folder / LOCK_FILE
    try:
        inode = os.stat(file).st_ino
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return []
    found = set()
    for line in lines:
        # 1: FLOCK ADVISORY READ 4711 00:31:123456 0 EOF; who waits for a lock has an arrow in front
        match line.split():
            case [_, "FLOCK", _, "READ", pid, place, *_] if place.rpartition(":")[2] == str(inode):
                found.add(int(pid))
    return sorted(pid for pid in found if _has_open(pid, file))


def _has_open(pid: int, file: Path) -> bool:
    """Return whether the process has the file open: another file system may have a file of the same inode."""
    here = os.path.realpath(file)
    with contextlib.suppress(OSError):
        return any(os.path.realpath(link) == here for link in Path(f"/proc/{pid}/fd").iterdir())
    return False
