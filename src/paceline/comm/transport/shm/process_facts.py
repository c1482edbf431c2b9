"""Facts of the system about processes of this host. Reads /proc; sends no signal."""

from __future__ import annotations

import mmap


def start_time(pid: int) -> int:
    """Return when the process started, in clock ticks since boot; 0 if it has ended, a zombie included."""
    fields = _stat(pid)
    return 0 if not fields or fields[0] == b"Z" else int(fields[19])


def resident_bytes() -> int:
    """Return the memory that this process has in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def is_stopped(pid: int) -> bool:
    """Return whether the process is halted by a signal or a debugger."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in (b"T", b"t")


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, the state first; none if the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []
