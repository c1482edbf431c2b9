"""Who is at work in a run's folder: its supervisor and its workers, whatever became of their caller.

    crew     locked by each of them, shared, for as long as it lives; the kernel gives it back
    leave    there while a new start waits for them: without a supervisor they save and leave at once

A caller's own lock is free as soon as the caller is dead; what it started may train on for a while, and a
start that comes then must neither write beside it nor miss what it does. Must not know what anybody does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.core.control import address
from paceline.core.errors import PacelineError, PlatformError

CREW_FILE: Final = "crew"
LEAVE_FILE: Final = "leave"
_LOCKS: Final = Path("/proc/locks")
_GRACE_SECONDS: Final = 0.5  # who is about to end is not worth a word
_LOOK_SECONDS: Final = 0.05
_TRIES: Final = 20

_taken: set[int] = set()  # descriptors of this process


def take_place(folder: Path) -> int | None:
    """The lock, as a descriptor that may be sent to another process: it holds as long as one has it open.
    None where nothing can be locked (no such function, no room for an empty file): better unprotected than
    not at all."""
    descriptor = _open(folder, os.O_CREAT)
    if descriptor is None:
        return None
    for _ in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOOK_SECONDS)  # somebody just looks whether it is free
        except OSError:
            break
        else:
            return descriptor
    os.close(descriptor)
    return None


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """This process is at work in the folder."""
    descriptor = take_place(folder)
    if descriptor is None:
        yield
        return
    _taken.add(descriptor)
    try:
        yield
    finally:
        _taken.discard(descriptor)
        os.close(descriptor)


def _leave_to_parent() -> None:
    """A child that outlives its parent must not keep the parent's place."""
    for descriptor in _taken:
        os.close(descriptor)
    _taken.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def is_known(folder: Path) -> bool:
    """Whether anybody ever was at work here."""
    return (folder / CREW_FILE).exists()


def is_asked_to_leave(folder: Path) -> bool:
    """Whether the run is being started again: who has no supervisor need not wait for one."""
    return (folder / LEAVE_FILE).exists()


def wait_until_gone(folder: Path, seconds: float, on_wait: Callable[[list[int]], None]) -> list[int] | None:
    """Asks all that are at work here to leave, and waits for them. None when nobody is left; after `seconds`
    those that are still there. `on_wait` is told once who is waited for."""
    begun = time.monotonic()
    leave = folder / LEAVE_FILE
    _remove(leave)  # a start that was killed while it waited may have left it
    asked = False
    try:
        while not is_free(folder):
            waited = time.monotonic() - begun
            if waited > seconds:
                return _holders(folder)
            if waited > _GRACE_SECONDS and not asked:
                asked = True
                on_wait(_holders(folder))
                with contextlib.suppress(PacelineError):  # no room: they leave in their own time
                    address.replace_file(leave, b"")
            time.sleep(_LOOK_SECONDS)
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
        return os.open(folder / CREW_FILE, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
    except OSError:
        return None


def is_free(folder: Path) -> bool:
    """Whether no process of a run is left here."""
    descriptor = _open(folder)
    if descriptor is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno != errno.EWOULDBLOCK
    else:
        # By name: a process forked right now has a copy of the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return True
    finally:
        os.close(descriptor)


def _holders(folder: Path) -> list[int]:
    """Processes of this machine that hold the lock, as far as the kernel tells."""
    file = folder / CREW_FILE
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
    """Another file system may have a file of the same number."""
    here = os.path.realpath(file)
    with contextlib.suppress(OSError):
        return any(os.path.realpath(link) == here for link in Path(f"/proc/{pid}/fd").iterdir())
    return False
