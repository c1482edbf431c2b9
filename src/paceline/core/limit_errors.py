"""Errors of the operating system about what ran out, with the limit's present value and how to raise it.

    except OSError as error:
        raise explain_os_error(error, "no socket for worker 3") from error

Reads limits from /proc and getrlimit only when something failed.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from paceline.core import available_resources
from paceline.core.errors import PacelineError, PlatformError, ResourceError

_SHM = "/dev/shm"


def explain_os_error(error: OSError, what: str) -> PacelineError:
    """Return the error for `what`, which failed with `error`: a ResourceError where something ran out."""
    match error.errno:
        case errno.EMFILE | errno.ENFILE:
            return too_many_files(error, what)
        case errno.EADDRINUSE | errno.EADDRNOTAVAIL:
            return no_port(error, what)
        case errno.EAGAIN:
            return no_processes(error, what)
        case errno.ENOMEM | errno.ENOSPC | errno.EFBIG:
            return no_memory(error, what)
    return PlatformError(f"{what}: {error.strerror or error}", remedy="see what the operating system says")


def too_many_files(error: OSError, what: str) -> ResourceError:
    """Return the error for EMFILE (too many files open in this process) or ENFILE (on the whole machine)."""
    if error.errno == errno.ENFILE:
        used, _, most = _read("fs/file-nr").split() or ("?", "", "?")
        return ResourceError(
            f"{what}: too many open files on this machine ({used} of fs.file-max={most})",
            remedy="as root: sysctl fs.file-max=2000000; or use fewer workers",
            limit=most,
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = f"`ulimit -n {_shown(hard)}`" if hard == resource.RLIM_INFINITY or hard > soft else ""
    return ResourceError(
        f"{what}: too many open files in this process (limit {_shown(soft)}, at most {_shown(hard)})",
        remedy=f"raise it with {raised} before the start, or use fewer workers"
        if raised
        else f"raise it as root: `ulimit -n {max(4 * soft, 65536)}`, or `nofile` in "
        "/etc/security/limits.conf; or use fewer workers",
        limit=soft,
    )


def no_port(error: OSError, what: str) -> ResourceError:
    """Return the error for EADDRINUSE or EADDRNOTAVAIL: the port is taken, none is left, or the address is
    not this machine's."""
    low, high, *_ = *_read("net/ipv4/ip_local_port_range").split(), "?", "?"
    limit = f"{low}-{high}"
    ports = f"net.ipv4.ip_local_port_range={limit}"
    if error.errno == errno.EADDRNOTAVAIL:
        reason = f": the address is not of this machine, or all ports of {ports} are in use"
        remedy = "listen on an address that `ip addr` shows; or"
    else:
        reason = f" (free ports are taken from {ports})"
        remedy = "choose another port, or 0 for any free one; `ss -tlnp` shows who has it; if all are in use,"
    remedy += ' as root: sysctl net.ipv4.ip_local_port_range="1024 65535"'
    return ResourceError(f"{what}: {error.strerror}{reason}", remedy=remedy, limit=limit)


def no_memory(error: OSError, what: str) -> ResourceError:
    """Return the error for ENOMEM, ENOSPC or EFBIG where memory (shared memory, a memory file) was wanted."""
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if error.errno == errno.ENOMEM and space != resource.RLIM_INFINITY:
        return ResourceError(
            f"{what}: {error.strerror}: this process may use {_bytes(space)} of address space",
            remedy="raise it with `ulimit -v unlimited` before the start",
            limit=space,
        )
    file, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if error.errno == errno.EFBIG and file != resource.RLIM_INFINITY:
        return ResourceError(
            f"{what}: {error.strerror}: files, and shared memory with them, may have {_bytes(file)}",
            remedy="raise it with `ulimit -f unlimited` before the start",
            limit=file,
        )
    available, total = _memory()
    overcommit = _read("vm/overcommit_memory").strip()
    strict = " and promises no more than there is (vm.overcommit_memory=2)" if overcommit == "2" else ""
    return ResourceError(
        f"{what}: {error.strerror}: this machine has {_bytes(available)} of {_bytes(total)} memory left"
        f"{strict}{_shared_memory()}",
        remedy="free memory or use fewer workers; where /dev/shm is the limit, as root: mount -o "
        "remount,size=8G /dev/shm (a container: --shm-size=8g)"
        + ("; sysctl vm.overcommit_memory=0" if strict else ""),
        limit=available,
    )


def no_processes(error: OSError, what: str) -> ResourceError:
    """Return the error for EAGAIN of fork or of a new thread: too many of them, by one of several limits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    found = {
        "`ulimit -u`": _shown(soft),
        "kernel.pid_max": _read("kernel/pid_max").strip(),
        "kernel.threads-max": _read("kernel/threads-max").strip(),
        "pids.max of its cgroup": available_resources.tightest(Path("/proc/self"), "pids", _pids_limit),
    }
    known = ", ".join(f"{name} {value}" for name, value in found.items() if value)
    return ResourceError(
        f"{what}: {error.strerror}: no more processes or threads ({known})",
        remedy=f"raise it with `ulimit -u {_shown(hard)}` before the start (a container: --pids-limit), or "
        "use fewer workers",
        limit=soft,
    )


def _read(name: str) -> str:
    return available_resources.read_text(Path("/proc/sys", name))


def _memory() -> tuple[int, int]:
    """Return available and all memory, in bytes."""
    lines = available_resources.read_text(Path("/proc/meminfo")).splitlines()
    if not lines:
        return 0, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return found.get("MemAvailable", 0), found.get("MemTotal", 0)


def _shared_memory() -> str:
    try:
        disk = os.statvfs(_SHM)
    except OSError:
        return ""
    free, total = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    return f", {_SHM} {_bytes(free)} of {_bytes(total)}"


def _pids_limit(folder: Path, version: int) -> int | None:
    text = available_resources.read_text(folder / "pids.max").strip()
    return int(text) if text.isdigit() else None


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
