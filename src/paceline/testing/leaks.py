"""Find what a piece of code left behind: threads, processes, file descriptors, shared-memory files.

Take a snapshot before, ask for the difference after. Linux only (it reads /proc). Processes that lost their
parent are found too if they carry the environment variable `TOKEN` of this process.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

from paceline.core.process_state import stat_fields

TOKEN = "PACELINE_LEAK_TOKEN"

_SHM = Path("/dev/shm")
_PAUSE = 0.01
_EXEC_TAKES = 5.0  # seconds at most, on a machine that waits for its disk
_EXEC_PAUSE = 0.001
_KERNEL = 2  # the process that is the parent of the kernel's threads


@dataclass(frozen=True)
class LeakedProcess:
    """A process, safe against reuse of its number."""

    pid: int
    started: int


@dataclass(frozen=True)
class Snapshot:
    """Threads, processes, descriptors and shared files that exist at one moment. `descriptors` are (number,
    target) pairs."""

    threads: frozenset[threading.Thread]
    processes: frozenset[LeakedProcess]
    descriptors: frozenset[tuple[int, str]]
    shared: frozenset[str]


@dataclass(frozen=True)
class Allowed:
    """Processes and descriptors that may stay, such as a warm server that outlives its first use."""

    pids: frozenset[int] = field(default_factory=frozenset)
    descriptors: frozenset[int] = field(default_factory=frozenset)


def mark() -> None:
    """Give this process's future children the token by which orphans are recognised."""
    os.environ[TOKEN] = f"{os.getpid()}-{time.monotonic_ns()}"


def snapshot() -> Snapshot:
    """Take a snapshot."""
    return Snapshot(
        threads=frozenset(threading.enumerate()),
        processes=_descendants(),
        descriptors=_descriptors("self"),
        shared=frozenset(os.listdir(_SHM)) if _SHM.is_dir() else frozenset(),
    )


def since(before: Snapshot, *, kept: Allowed | None = None, patience: float = 5.0) -> list[str]:
    """Return what exists now and did not before, one sentence each, after at most `patience` seconds."""
    kept = kept or Allowed()
    deadline = time.monotonic() + patience
    found = _difference(before, kept)
    if found:
        gc.collect()
        found = _difference(before, kept)
    while found and time.monotonic() < deadline:
        # Cycles may hold sockets and files. Collected each time: what a thread holds that is about to end
        # becomes garbage only then.
        gc.collect()
        time.sleep(_PAUSE)
        found = _difference(before, kept)
    return found


def _difference(before: Snapshot, kept: Allowed) -> list[str]:
    now = snapshot()
    # The standard library starts one resource tracker per process and keeps it until exit.
    tracker = resource_tracker._resource_tracker
    pids = kept.pids | {getattr(tracker, "_pid", None)}
    descriptors = kept.descriptors | {getattr(tracker, "_fd", None)}
    threads = [f"thread {t.name!r}" for t in now.threads - before.threads if t.is_alive()]
    processes = [
        f"process {p.pid}: {_command(p.pid)}" for p in now.processes - before.processes if p.pid not in pids
    ]
    # Libraries keep their own data files open (matplotlib its fonts) from first use to exit. The environment
    # may be a link; descriptors name what it leads to.
    libraries = tuple(os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix))
    files = [
        f"file descriptor {number}: {target}"
        for number, target in now.descriptors - before.descriptors
        if number not in descriptors and not target.startswith(libraries)
    ]
    shared = [f"shared memory {_SHM / name}" for name in now.shared - before.shared if _is_ours(name)]
    return sorted(threads + processes + files + shared)


def _descendants() -> frozenset[LeakedProcess]:
    """Find children, their children with zombies, and orphans that carry the token (init reaps those)."""
    me = os.getpid()
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    stats = {pid: fields for pid in pids if (fields := stat_fields(pid))}  # others are gone meanwhile
    parents = {pid: int(fields[1]) for pid, fields in stats.items()}
    found = {pid: LeakedProcess(pid, int(fields[19])) for pid, fields in stats.items()}
    ours = {me}
    while below := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= below
    token = os.environ.get(TOKEN)
    if token is not None:
        needle = f"{TOKEN}={token}".encode()
        # Zombies, and the kernel's own threads, have no environment.
        others = [pid for pid in stats.keys() - ours if not _is_gone(stats[pid])]
        others = [pid for pid in others if _KERNEL not in (pid, parents[pid])]
        ours |= {pid for pid in others if _carries(found[pid], needle)}
    return frozenset(found[pid] for pid in ours - {me} if pid in found)


@functools.lru_cache(maxsize=1024)
def _carries(process: LeakedProcess, needle: bytes) -> bool:
    """Return whether a process carries the token; remembered, because it never changes."""
    try:
        return needle in _environment(process.pid).split(b"\0")
    except OSError:
        return False


def _environment(pid: int) -> bytes:
    """Return what a process was started with, also when it is only just being started.

    In the middle of exec there is a moment in which a process has no environment yet.
    """
    deadline = time.monotonic() + _EXEC_TAKES
    while True:
        fields = stat_fields(pid)
        # An empty environment stays so if the program is loaded (its code has an end), or is gone.
        settled = not fields or fields[24] != b"0" or _is_gone(fields)
        environment = _read(pid, "environ")
        if environment or settled or time.monotonic() > deadline:
            return environment
        time.sleep(_EXEC_PAUSE)


def _is_gone(fields: list[bytes]) -> bool:
    return fields[0] in b"ZX"


def _read(pid: int | str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
        return file.read()


def _descriptors(pid: int | str) -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):  # closed meanwhile, such as the listing's own descriptor
            found.add((int(name), os.readlink(f"/proc/{pid}/fd/{name}")))
    return frozenset(found)


def _is_ours(name: str) -> bool:
    """Return whether a new file in /dev/shm can be ours: it exists, is our user's, no stranger uses it."""
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
        return any(target == path for _, target in _descriptors(pid))
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        words = _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone meanwhile"
    return words[:120] or "a zombie that was not reaped"
