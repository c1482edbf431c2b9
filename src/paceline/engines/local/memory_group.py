"""The memory cgroup of a process: how often the kernel killed in it, and how much it may use.

Both versions of cgroups are read. A group of one's own with a small limit can be made below the present one,
where the system allows that: what is in it is killed for memory without any danger to the rest. Must not
know who asks, nor what runs in a group.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import final

_UNLIMITED = 1 << 60  # version 1 writes a page-rounded maximum where there is no limit


@final
@dataclass(frozen=True)
class MemoryGroup:
    """A folder of the cgroup file system; `top` is where the hierarchy is mounted."""

    path: Path
    top: Path
    version: int

    def kills(self) -> int | None:
        """Processes of this group that the kernel killed for memory so far; None where it does not say."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        return _counter(self.path / name, "oom_kill")

    def limit(self) -> int | None:
        """The tightest limit in bytes, of this group or of one that it is in; None: only the machine's."""
        name = "memory.max" if self.version == 2 else "memory.limit_in_bytes"
        found = []
        for folder in (self.path, *self.path.parents):
            text = _read(folder / name).strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                found.append(int(text))
            if folder == self.top:
                break
        return min(found, default=None)

    def enter(self) -> None:
        """Moves this process, with all its threads, into the group. What it has in memory stays counted where
        it was."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Only possible when nobody is in it any more."""
        self.path.rmdir()


def group_of(pid: int) -> MemoryGroup | None:
    """The memory group of a process; None when it is gone, or there are no such groups here."""
    lines = _read(Path(f"/proc/{pid}/cgroup")).splitlines()
    listed = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for controllers, path in listed.items():
        if "memory" in controllers.split(","):
            return _located(path, 1)
    return _located(listed[""], 2) if "" in listed else None


def make_below(name: str, limit: int) -> MemoryGroup:
    """A new, empty group with this limit, below the present one where rules allow; OSError where this process
    may not have one."""
    present = group_of(os.getpid())
    if present is None:
        raise FileNotFoundError("no memory cgroups are mounted here")
    folder = present.path
    if present.version == 2 and folder != present.top:
        # A group of version 2 with processes in it has no groups below; a sibling is as good.
        folder = folder.parent
    if present.version == 2 and "memory" not in _read(folder / "cgroup.subtree_control").split():
        raise PermissionError(f"{folder} does not hand its memory controller on to groups below it")
    made = MemoryGroup(folder / name, present.top, present.version)
    made.path.mkdir()
    try:
        limits = (
            ("memory.max", "memory.swap.max")
            if made.version == 2
            else ("memory.limit_in_bytes", "memory.swappiness")
        )
        (made.path / limits[0]).write_text(str(limit))
        if (made.path / limits[1]).exists():
            (made.path / limits[1]).write_text("0")
    except OSError:
        made.remove()
        raise
    return made


def _located(path: str, version: int) -> MemoryGroup | None:
    mounted = _mounts().get(version)
    if mounted is None:
        return None
    top, root = mounted
    inside = path[len(root) :] if root != "/" and path.startswith(root) else path
    folder = top / inside.lstrip("/")
    return MemoryGroup(folder, top, version) if folder.is_dir() else None


@functools.cache
def _mounts() -> dict[int, tuple[Path, str]]:
    """For each version, where the hierarchy with the memory controller is mounted, and which part of it."""
    found: dict[int, tuple[Path, str]] = {}
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = [*after.split(), "", "", ""][:3]
        if kind == "cgroup" and "memory" in options.split(","):
            found[1] = (Path(mount), root)
        elif kind == "cgroup2" and "memory" in _read(Path(mount) / "cgroup.controllers").split():
            found[2] = (Path(mount), root)
    return found


def _counter(file: Path, name: str) -> int | None:
    for line in _read(file).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
