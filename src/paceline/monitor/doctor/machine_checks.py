"""Checks of this machine. What is judged is an argument, so that each judgement is a pure function; the
`look_at_machine` at the end reads the machine."""

from __future__ import annotations

import os
import platform
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from paceline.core import available_resources
from paceline.core.wording import counted
from paceline.monitor.doctor.finding import DoctorFinding, ok, warning, wrong

_GIB: Final = 1 << 30
_PYTHON: Final = (3, 11)
_TORCH: Final = (2, 11)
_DEBUG_LEVELS: Final = ("VERSION", "WARN", "INFO", "ABORT", "TRACE")
_LEAST_SHM: Final = 512 << 20
_LEAST_FILES: Final = 1024
_MAPPED: Final = 256 * _GIB  # of address space, which a run reserves and does not use


def check_python(version: tuple[int, int, int]) -> DoctorFinding:
    text = ".".join(map(str, version))
    if version[:2] < _PYTHON:
        return wrong("python", text, "Paceline needs Python 3.11 or later: make an environment with one")
    return ok("python", text)


def check_torch(version: str | None, problem: str = "") -> DoctorFinding:
    """Judge the version that was imported; None where it could not be, with the `problem`."""
    if version is None:
        return wrong("torch", f"cannot be imported: {problem}", "pip install torch")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < _TORCH:
        return wrong("torch", f"{version} is too old", "pip install --upgrade 'torch>=2.11'")
    return ok("torch", version)


def check_gpus(on_machine: int, usable: Sequence[str], build: str | None) -> DoctorFinding:
    """Judge what torch can use (`usable`: names) against what the machine has; `build`: torch's CUDA."""
    if usable:
        return ok("gpus", f"{counted(len(usable), 'GPU')}: {', '.join(dict.fromkeys(usable))}")
    if not on_machine:
        return ok("gpus", "none is visible: workers compute on the CPU")
    there = f"{counted(on_machine, 'GPU', 'is', 'are')} there and torch cannot use them"
    if build is None:
        return wrong("gpus", f"{there}: it was built without CUDA", "install a build of torch with CUDA")
    return wrong(
        "gpus",
        f"{there} (built for CUDA {build})",
        "update the driver (nvidia-smi), or check the container's GPUs",
    )


def check_nccl(version: str | None, gpus: int) -> DoctorFinding:
    if version is not None:
        return ok("nccl", version)
    if gpus:
        return wrong(
            "nccl", "torch has none", "install a build of torch with NCCL (those for Linux with CUDA)"
        )
    return ok("nccl", "not needed: it carries gradients between GPUs")


def check_socket_interface(value: str | None, interfaces: Sequence[str], gpus: int) -> DoctorFinding:
    """NCCL_SOCKET_IFNAME: prefixes of names; `=` in front: whole names, `^`: all but these."""
    topic = "NCCL_SOCKET_IFNAME"
    outer = [name for name in interfaces if name != "lo"]
    if not value:
        if not gpus:
            return ok(topic, "not set, and not needed without a GPU")
        if len(outer) > 1:
            return warning(
                topic,
                f"not set, and there are {', '.join(outer)}: NCCL may take one that other hosts do not reach",
                f"name the one that leads to the other hosts: export NCCL_SOCKET_IFNAME={outer[0]}",
            )
        return ok(topic, f"not set: NCCL takes {outer[0] if outer else 'lo'}, the only one")
    exact, without = value.startswith(("=", "^=")), value.startswith("^")
    names = value.lstrip("^=").split(",")
    named = [
        found for found in interfaces if any(found == n if exact else found.startswith(n) for n in names if n)
    ]
    chosen = [found for found in interfaces if found not in named] if without else named
    if not chosen:
        return wrong(
            topic,
            f"{value}: no interface of this machine fits (it has {', '.join(interfaces)})",
            f"name one of them, or unset it: export NCCL_SOCKET_IFNAME={outer[0] if outer else 'lo'}",
        )
    return ok(topic, f"{value}: NCCL takes {', '.join(chosen)}")


def check_debug_level(value: str | None) -> DoctorFinding:
    topic = "NCCL_DEBUG"
    if not value:
        return ok(topic, "not set: NCCL is silent; where a group does not form, WARN shows why")
    if value.upper() not in _DEBUG_LEVELS:
        return warning(
            topic, f"{value}: unknown, so NCCL stays silent", "export NCCL_DEBUG=WARN, or unset it"
        )
    return ok(
        topic, f"{value}: NCCL prints what goes wrong" + ("" if value.upper() == "WARN" else ", and more")
    )


def check_infiniband(value: str | None, devices: Sequence[str]) -> DoctorFinding:
    topic = "NCCL_IB_DISABLE"
    disabled = value not in (None, "", "0")
    if disabled and devices:
        return warning(
            topic,
            f"{value}: NCCL leaves InfiniBand ({', '.join(devices)}) alone and takes slower sockets",
            "unset NCCL_IB_DISABLE, unless InfiniBand is broken here",
        )
    if disabled:
        return ok(topic, f"{value}: no InfiniBand, and there is none")
    if devices:
        return ok(topic, f"not set: NCCL takes InfiniBand ({', '.join(devices)})")
    return ok(topic, "not set, and there is no InfiniBand: NCCL takes sockets")


def check_shared_memory(total: int | None, free: int | None) -> DoctorFinding:
    remedy = "docker run --shm-size=2g, or mount -o remount,size=2g /dev/shm"
    if total is None or free is None:
        return warning("shared memory", "there is no /dev/shm: DataLoader processes of torch need it", remedy)
    text = f"{free / _GIB:.2f} of {total / _GIB:.2f} GiB of /dev/shm free"
    if free < _LEAST_SHM:
        return warning("shared memory", f"{text}: too little for DataLoader processes", remedy)
    return ok("shared memory", text)


def check_limits(
    files: int | None, address_space: int | None, processes: int | None
) -> Iterator[DoctorFinding]:
    """Judge `ulimit -n`, `-v` and `-u`; None is unlimited."""
    if files is not None and files < _LEAST_FILES:
        yield warning("open files", f"at most {files:,} in a process", "ulimit -n 65536, before the start")
    else:
        yield ok("open files", "unlimited" if files is None else f"at most {files:,} in a process")
    if address_space is not None and address_space < _MAPPED:
        yield wrong(
            "address space",
            f"limited to {address_space / _GIB:.1f} GiB: a run reserves {_MAPPED // _GIB} GiB of it, unused",
            "ulimit -v unlimited; limit the memory itself with a control group",
        )
    if processes is not None and processes < 512:
        yield warning("processes", f"at most {processes:,} of this user", "ulimit -u 4096, before the start")


def check_memory(available: int, cores: int) -> DoctorFinding:
    text = f"{counted(cores, 'core')}, {available / _GIB:.1f} GiB of memory free"
    if available < _GIB:
        return warning(
            "processor", text, "end what is not needed; each worker takes 0.1 GiB and the model's part"
        )
    return ok("processor", text)


def look_at_machine(environment: Mapping[str, str] = os.environ) -> Iterator[DoctorFinding]:
    """Look at this machine; imports torch."""
    import psutil

    major, minor, micro = (int(part) for part in platform.python_version_tuple()[:3])
    yield check_python((major, minor, micro))
    yield from _look_at_torch(environment)
    interfaces = sorted(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.family in (socket.AF_INET, socket.AF_INET6) for address in addresses)
    )
    gpus = available_resources.visible_gpus(environment)
    yield check_socket_interface(environment.get("NCCL_SOCKET_IFNAME"), interfaces, gpus)
    yield check_debug_level(environment.get("NCCL_DEBUG"))
    yield check_infiniband(environment.get("NCCL_IB_DISABLE"), _names(Path("/sys/class/infiniband")))
    limit = available_resources.memory_limit()
    free = psutil.virtual_memory().available
    yield check_memory(free if limit is None else min(free, limit), available_resources.cores())
    try:
        disk = os.statvfs("/dev/shm")
        yield check_shared_memory(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize)
    except OSError:
        yield check_shared_memory(None, None)
    limits = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_NPROC)
    yield from check_limits(*map(_soft_limit, limits))


def _look_at_torch(environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    on_machine = available_resources.visible_gpus(environment)
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of it cannot be loaded
        yield check_torch(None, str(error))
        return
    yield check_torch(torch.__version__)
    usable = (
        [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    yield check_gpus(on_machine, usable, torch.version.cuda)
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available() and usable
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None  # type: ignore[no-untyped-call]
    yield check_nccl(version, len(usable))


def _soft_limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
