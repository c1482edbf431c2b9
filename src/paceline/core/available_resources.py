"""Resources that a process may use: cores by affinity and by the quota of its control groups, memory by their
limit; and whether a freezer holds it.

A container that may use half a CPU sees all cores of its host; code that counts them by affinity alone starts
far too many threads. Both versions of cgroups are read, with every group that the process's own is in.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

N = TypeVar("N", int, float)

_PROC: Final = Path("/proc/self")
_DEVICES: Final = Path("/dev")
_UNLIMITED: Final = 1 << 60  # version 1 writes a page-rounded maximum where there is no limit


def cores(proc: Path = _PROC) -> int:
    """Return the cores that this process can keep busy: at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(proc)
    return allowed if quota is None else max(1, min(allowed, -int(-quota // 1)))


def cpu_quota(proc: Path = _PROC) -> float | None:
    """Return the CPUs of the tightest quota of this process's groups; None without one."""
    return tightest(proc, "cpu", _quota)


def memory_limit(proc: Path = _PROC) -> int | None:
    """Return the bytes of the tightest limit of this process's groups; None without one."""
    return tightest(proc, "memory", memory_limit_of)


def visible_gpus(environment: Mapping[str, str] = os.environ, devices: Path = _DEVICES) -> int:
    """Return how many NVIDIA GPUs this process may see: those of the machine, or fewer where
    CUDA_VISIBLE_DEVICES names some. Loads no driver."""
    there = sum(1 for path in devices.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit())
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    named = [name.strip() for name in chosen.split(",")]
    # What follows a name that is none is not seen, as CUDA has it.
    valid = named.index("-1") if "-1" in named else len(named)
    return min(there, sum(bool(name) for name in named[:valid]))


def is_frozen(proc: Path = _PROC) -> bool:
    """Return whether a freezer holds the process: that of its group, or of one above. The process's own state
    does not show it: it looks asleep, in a function of the kernel that differs from version to version."""
    return any(_is_frozen(folder, version) for folder, version in _folders(proc, "freezer"))


@dataclass(frozen=True)
class Cgroup:
    """A folder of the cgroup file system; `top` is where the hierarchy is mounted."""

    path: Path
    top: Path
    version: int

    def ancestry(self) -> Iterator[Path]:
        """Return this folder and those above it, up to `top`."""
        for folder in (self.path, *self.path.parents):
            yield folder
            if folder == self.top:
                return


def groups(proc: Path, controller: str, mounts: Path | None = None) -> Iterator[Cgroup]:
    """Return the groups of a process (`/proc/PID`) that have the controller, as mounted for `mounts`."""
    mounted = _mounts(mounts or proc, controller)
    for line in read_text(proc / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        version = 1 if controller in controllers.split(",") else 2 if number == "0" and not controllers else 0
        if version in mounted:
            top, root = mounted[version]
            # In a container the mount may be a part of the hierarchy.
            inside = path[len(root) :] if root != "/" and path.startswith(root) else path
            yield Cgroup(top / inside.lstrip("/"), top, version)


@functools.cache
def _mounts(proc: Path, controller: str) -> dict[int, tuple[Path, str]]:
    """Return for each version where the hierarchy with the controller is mounted, and which part of it."""
    found: dict[int, tuple[Path, str]] = {}
    for line in read_text(proc / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        kind, _, options = [*after.split(), "", "", ""][:3]
        if len(fields) < 5:
            continue
        if kind == "cgroup" and controller in options.split(","):
            found[1] = (Path(fields[4]), fields[3])
        elif kind == "cgroup2":
            found[2] = (Path(fields[4]), fields[3])
    return found


def tightest(proc: Path, controller: str, read: Callable[[Path, int], N | None]) -> N | None:
    """Return the least limit of the process's groups that have the controller; `read(folder, version)`
    returns that of one."""
    found = [read(folder, version) for folder, version in _folders(proc, controller)]
    return min((one for one in found if one is not None), default=None)


def _folders(proc: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Return the folders of the process's groups that may limit it, from its own up to the mount's."""
    for group in groups(proc, controller):
        # Inside a container the path may be the host's, which is not to be seen.
        for folder in group.ancestry() if group.path.is_dir() else (group.top,):
            yield folder, group.version


def _is_frozen(folder: Path, version: int) -> bool:
    if version == 1:
        return read_text(folder / "freezer.state").strip() in ("FROZEN", "FREEZING")
    return "frozen 1" in read_text(folder / "cgroup.events").splitlines()


def _quota(folder: Path, version: int) -> float | None:
    """Return the CPUs of one group's quota; "max", -1 and files that are not there are none."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
    match " ".join(read_text(folder / name) for name in names).split():
        case [quota, period] if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            return int(quota) / int(period)
    return None


def memory_limit_of(folder: Path, version: int) -> int | None:
    """Return the limit of one group in bytes; None where it has none."""
    text = read_text(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def read_text(file: Path) -> str:
    """Return a file of /proc or of a cgroup; empty where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
