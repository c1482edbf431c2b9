"""The memory cgroup of a process: how often the kernel killed in it, and how much it may use.

Both versions of cgroups are read. A new group with a small limit can be made below the present one,
where the system allows that: what is in it is killed for memory without any danger to the rest.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import final

from paceline.core import available_resources
from paceline.core.available_resources import read_text


@final
class MemoryCgroup(available_resources.Cgroup):
    """A cgroup with the memory controller."""

    def kills(self) -> int | None:
        """Return how many processes of this group the kernel killed for memory; None without a counter."""
        text = read_text(self.path / ("memory.events" if self.version == 2 else "memory.oom_control"))
        counts = [line.split()[1] for line in text.splitlines() if line.startswith("oom_kill ")]
        return int(counts[0]) if counts else None

    def limit(self) -> int | None:
        """Return the tightest limit in bytes, of this group or of one that it is in; None: only the
        machine's."""
        limits = [available_resources.memory_limit_of(folder, self.version) for folder in self.ancestry()]
        return min((limit for limit in limits if limit is not None), default=None)

    def enter(self) -> None:
        """Move this process, with all its threads, into the group. What it has in memory stays counted where
        it was."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Remove the group; OSError while a process is in it."""
        self.path.rmdir()


def cgroup_of(pid: int) -> MemoryCgroup | None:
    """Return the memory group of a process; None when it is gone, or there are no such groups here."""
    for group in available_resources.groups(Path(f"/proc/{pid}"), "memory", mounts=Path("/proc/self")):
        return MemoryCgroup(group.path, group.top, group.version) if group.path.is_dir() else None
    return None


def make_cgroup_below(name: str, limit: int) -> MemoryCgroup:
    """Return a new, empty group with this limit, below the present one where rules allow; OSError where this
    process may not have one."""
    present = cgroup_of(os.getpid())
    if present is None:
        raise FileNotFoundError("no memory cgroups are mounted here")
    folder = present.path
    if present.version == 2 and folder != present.top:
        # A group of version 2 with processes in it has no groups below; a sibling is as good.
        folder = folder.parent
    if present.version == 2 and "memory" not in read_text(folder / "cgroup.subtree_control").split():
        raise PermissionError(f"{folder} does not hand its memory controller on to groups below it")
    made = MemoryCgroup(folder / name, present.top, present.version)
    made.path.mkdir()
    try:
        v2 = made.version == 2
        (made.path / ("memory.max" if v2 else "memory.limit_in_bytes")).write_text(str(limit))
        swap = made.path / ("memory.swap.max" if v2 else "memory.swappiness")
        if swap.exists():
            swap.write_text("0")
    except OSError:
        made.remove()
        raise
    return made
