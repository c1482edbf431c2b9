"""What of this machine a process may use: cores by affinity and by the quota of its control groups, memory by
their limit; and whether a freezer holds it.

A container that may use half a CPU sees all cores of its host; what counts them by affinity alone starts far
too many threads. Both versions of cgroups are read, with every group that the process's own is in. Must not
know what cores and memory are for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc/self")
_UNLIMITED: Final = 1 << 60  # version 1 writes a page-rounded maximum where there is no limit


def cores(proc: Path = _PROC) -> int:
    """Cores that this process can keep busy: at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(proc)
    return allowed if quota is None else max(1, min(allowed, -int(-quota // 1)))


def cpu_quota(proc: Path = _PROC) -> float | None:
    """CPUs by the tightest quota of this process's groups; None without one."""
    return _least(proc, "cpu", _quota_of_1, _quota_of_2)


def memory_limit(proc: Path = _PROC) -> int | None:
    """Bytes by the tightest limit of this process's groups; None without one."""
    found = _least(proc, "memory", _limit_of_1, _limit_of_2)
    return None if found is None else int(found)


def is_frozen(proc: Path = _PROC) -> bool:
    """Whether a freezer holds the process: that of its group, or of one above. Its own state does not tell:
    it looks like one that sleeps, in a function of the kernel that differs from version to version."""
    found = [read(folder) for folder, read in _folders(proc, "freezer", _frozen_of_1, _frozen_of_2)]
    return any(found)


_Read = Callable[[Path], float | None]


def _least(proc: Path, controller: str, first: _Read, second: _Read) -> float | None:
    found = [read(folder) for folder, read in _folders(proc, controller, first, second)]
    return min((one for one in found if one is not None), default=None)


def _folders(proc: Path, controller: str, first: _Read, second: _Read) -> Iterator[tuple[Path, _Read]]:
    """The folders of the process's groups that may limit it, from its own up to the mount's."""
    mounted = _mounts(proc, controller)
    for line in _text(proc / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        version = 1 if controller in controllers.split(",") else 2 if number == "0" and not controllers else 0
        if version not in mounted:
            continue
        top, root = mounted[version]
        # Inside a container the path may be the host's, and the mount a part of the hierarchy.
        inside = path[len(root) :] if root != "/" and path.startswith(root) else path
        folder = top / inside.lstrip("/")
        if not folder.is_dir():
            folder = top
        for each in (folder, *folder.parents):
            yield each, first if version == 1 else second
            if each == top:
                break


def _frozen_of_1(group: Path) -> float | None:
    return float(_text(group / "freezer.state").strip() in ("FROZEN", "FREEZING"))


def _frozen_of_2(group: Path) -> float | None:
    return float("frozen 1" in _text(group / "cgroup.events").splitlines())


def _mounts(proc: Path, controller: str) -> dict[int, tuple[Path, str]]:
    """For each version, where the hierarchy with the controller is mounted, and which part of it."""
    found: dict[int, tuple[Path, str]] = {}
    for line in _text(proc / "mountinfo").splitlines():
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


def _quota_of_1(folder: Path) -> float | None:
    return _share(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us"))


def _quota_of_2(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    return _share(quota, period)


def _share(quota: str, period: str) -> float | None:
    """ "max", -1 and files that are not there are no quota."""
    quota, period = quota.strip(), period.strip()
    if not (quota.isdigit() and period.isdigit() and int(quota) and int(period)):
        return None
    return int(quota) / int(period)


def _limit_of_1(folder: Path) -> float | None:
    return _bytes(_text(folder / "memory.limit_in_bytes"))


def _limit_of_2(folder: Path) -> float | None:
    return _bytes(_text(folder / "memory.max"))


def _bytes(text: str) -> float | None:
    text = text.strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
