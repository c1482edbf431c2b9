"""What a piece of code left behind: threads, processes, file descriptors, shared-memory files.

Take a snapshot before, ask for the difference after. Linux only (it reads /proc). Processes that lost their
parent are found too when they carry the environment variable `TOKEN` of this process. Must not know what is
being tested.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

TOKEN = "PACELINE_LEAK_TOKEN"

_SHM = Path("/dev/shm")
_PAUSE = 0.01
_EXEC_TAKES = 5.0  # seconds at most, on a machine that waits for its disk
_EXEC_PAUSE = 0.001
_KERNEL = 2  # the process that is the parent of the kernel's threads


@dataclass(frozen=True)
class Process:
    """A process, safe against reuse of its number."""

    pid: int
    started: int


@dataclass(frozen=True)
class Snapshot:
    """What exists at one moment. `descriptors` are (number, target) pairs."""

    threads: frozenset[threading.Thread]
    processes: frozenset[Process]
    descriptors: frozenset[tuple[int, str]]
    shared: frozenset[str]


@dataclass(frozen=True)
class Kept:
    """What may stay: a warm server that outlives its first use, say."""

    pids: frozenset[int] = field(default_factory=frozenset)
    descriptors: frozenset[int] = field(default_factory=frozenset)


def mark() -> None:
    """Give this process's future children the token by which orphans are recognised."""
    os.environ[TOKEN] = f"{os.getpid()}-{time.monotonic_ns()}"


def snapshot() -> Snapshot:
    """What exists now."""
    return Snapshot(
        threads=frozenset(threading.enumerate()),
        processes=_descendants(),
        descriptors=_descriptors(),
        shared=frozenset(os.listdir(_SHM)) if _SHM.is_dir() else frozenset(),
    )


def since(before: Snapshot, *, kept: Kept | None = None, patience: float = 5.0) -> list[str]:
    """What exists now and did not before, one sentence each; gives it `patience` seconds to go away."""
    kept = kept or Kept()
    deadline = time.monotonic() + patience
    found = _difference(before, kept)
    if found:
        # Cycles may hold sockets and files; only worth the time when something is left.
        gc.collect()
    while found and time.monotonic() < deadline:
        time.sleep(_PAUSE)
        found = _difference(before, kept)
    return found


def _difference(before: Snapshot, kept: Kept) -> list[str]:
    now = snapshot()
    pids = kept.pids | _tracker_pids()
    descriptors = kept.descriptors | _tracker_descriptors()
    threads = [f"thread {t.name!r}" for t in now.threads - before.threads if t.is_alive()]
    processes = [
        f"process {p.pid}: {_command(p.pid)}" for p in now.processes - before.processes if p.pid not in pids
    ]
    files = [
        f"file descriptor {number}: {target}"
        for number, target in now.descriptors - before.descriptors
        if number not in descriptors and not _belongs_to_python(target)
    ]
    shared = [f"shared memory {_SHM / name}" for name in now.shared - before.shared if _is_ours(name)]
    return sorted(threads + processes + files + shared)


def _descendants() -> frozenset[Process]:
    """Children, their children with zombies, and orphans that carry our token (their zombies are init's)."""
    me = os.getpid()
    parents: dict[int, int] = {}
    started: dict[int, int] = {}
    gone: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = _fields(_read(entry, "stat"))
        except OSError:
            continue
        parents[int(entry)] = int(fields[1])
        started[int(entry)] = int(fields[19])
        if _is_gone(fields):
            gone.add(int(entry))
    ours = {me}
    grew = True
    while grew:
        below = {pid for pid, parent in parents.items() if parent in ours} - ours
        ours |= below
        grew = bool(below)
    token = os.environ.get(TOKEN)
    if token is not None:
        needle = f"{TOKEN}={token}".encode()
        # The kernel's own threads have no environment.
        others = [pid for pid in parents.keys() - ours - gone if _KERNEL not in (pid, parents[pid])]
        ours |= {pid for pid in others if _carries(Process(pid, started[pid]), needle)}
    return frozenset(Process(pid, started[pid]) for pid in ours - {me} if pid in started)


@functools.lru_cache(maxsize=1024)
def _carries(process: Process, needle: bytes) -> bool:
    """Remembered: a stranger does not become ours later."""
    try:
        return needle in _environment(process.pid).split(b"\0")
    except OSError:
        return False


def _environment(pid: int) -> bytes:
    """What the process was started with, also when it is only just being started.

    In the middle of exec there is a moment in which a process has no environment yet.
    """
    deadline = time.monotonic() + _EXEC_TAKES
    while True:
        settled = _is_settled(_fields(_read(pid, "stat")))
        environment = _read(pid, "environ")
        if environment or settled or time.monotonic() > deadline:
            return environment
        time.sleep(_EXEC_PAUSE)


def _is_settled(fields: list[bytes]) -> bool:
    """Whether an empty environment will stay so: the program is loaded (its code has an end), or is gone."""
    return fields[24] != b"0" or _is_gone(fields)


def _is_gone(fields: list[bytes]) -> bool:
    return fields[0] in b"ZX"


def _fields(stat: bytes) -> list[bytes]:
    # The command in parentheses may itself hold spaces and parentheses.
    return stat[stat.rfind(b")") + 2 :].split()


def _read(pid: int | str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()


def _descriptors() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue  # the listing's own descriptor, already closed
    return frozenset(found)


def _belongs_to_python(target: str) -> bool:
    # Libraries keep their own data files open (matplotlib its fonts) from first use to exit.
    return target.startswith((sys.prefix, sys.base_prefix))


def _is_ours(name: str) -> bool:
    """Whether a new file in /dev/shm can be ours: it is still there, our user's, and no stranger uses it."""
    path = _SHM / name
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    if status.st_uid != os.getuid():
        return False
    family = {process.pid for process in _descendants()} | {os.getpid()}
    strangers = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) not in family)
    return not any(_uses(pid, str(path)) for pid in strangers)


def _uses(pid: int, path: str) -> bool:
    try:
        if any(path in line for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()):
            return True
        return any(_target(f"/proc/{pid}/fd/{name}") == path for name in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def _target(link: str) -> str | None:
    """Where a descriptor of another process leads; None if it was closed meanwhile."""
    try:
        return os.readlink(link)
    except OSError:
        return None


def _command(pid: int) -> str:
    try:
        words = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone meanwhile"
    return words[:120] or "a zombie nobody waited for"


# The standard library starts one tracker per process and keeps it until exit.
def _tracker_pids() -> frozenset[int]:
    pid = getattr(resource_tracker._resource_tracker, "_pid", None)
    return frozenset() if pid is None else frozenset({pid})


def _tracker_descriptors() -> frozenset[int]:
    number = getattr(resource_tracker._resource_tracker, "_fd", None)
    return frozenset() if number is None else frozenset({number})
