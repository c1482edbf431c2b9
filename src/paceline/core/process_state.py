"""Facts of the kernel about a process of this host: state, start, memory. Reads /proc; sends no signal."""

from __future__ import annotations

import mmap
from pathlib import Path

from paceline.core import available_resources


def start_time(pid: int) -> int:
    """Return when the process started, in clock ticks since boot; 0 if it has ended, a zombie included."""
    fields = stat_fields(pid)
    return 0 if not fields or fields[0] == b"Z" else int(fields[19])


def resident_bytes() -> int:
    """Return the memory that this process has in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def state_letter(pid: int) -> str:
    """Return the state as proc(5) writes it: R, S, D, T, ...; empty if there is no such process."""
    fields = stat_fields(pid)
    return fields[0].decode() if fields else ""


def has_ended(pid: int) -> bool:
    """Return whether the process is gone, or a zombie."""
    return state_letter(pid) in ("", "Z", "X", "x")


def is_stopped(pid: int) -> bool:
    """Return whether the process is halted by a signal or a debugger."""
    return state_letter(pid) in ("T", "t")


def is_stopped_or_frozen(pid: int) -> bool | None:
    """Return whether the process is kept from running, also by the freezer of its cgroup; None: it has
    ended."""
    if has_ended(pid):
        return None
    return is_stopped(pid) or available_resources.is_frozen(Path(f"/proc/{pid}"))


def stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, the state first; none if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
