"""`paceline info`: versions, cores, memory and limits of this machine. Imports no torch."""

from __future__ import annotations

import os
import platform
import resource

import paceline
from paceline.cli.output import AsJson, echo_json
from paceline.core import available_resources

_PACKAGES = (
    "torch",
    "numpy",
    "msgpack",
    "cloudpickle",
    "cryptography",
    "ray",
    "optuna",
    "starlette",
    "mlflow",
    "matplotlib",
)


def info(as_json: AsJson = False) -> None:
    """Show versions, cores, memory and limits of this machine.

    Example: paceline info --json
    """
    facts = collect()
    if as_json:
        echo_json(facts)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in facts.items():
        if isinstance(value, dict):
            for inner, item in value.items():
                table.add_row(inner, _shown(inner, item))
        else:
            table.add_row(name, _shown(name, value))
    Console().print(table)


def collect() -> dict[str, object]:
    """Return what `paceline info` shows: sizes in bytes, None for what is absent or unlimited."""
    import psutil

    from paceline.core import mac_algorithms

    memory = psutil.virtual_memory()
    return {
        "paceline": paceline.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cores": {"cores_usable": available_resources.cores(), "cores_total": os.cpu_count()},
        "memory": {
            "memory_total": memory.total,
            "memory_available": memory.available,
            "memory_limit": available_resources.memory_limit(),
        },
        "shared_memory": _shared_memory(),
        "data_between_hosts": {"authenticated_by": mac_algorithms.describe(mac_algorithms.offered())},
        "limits": {
            "open_files": _limit(resource.RLIMIT_NOFILE),
            "processes": _limit(resource.RLIMIT_NPROC),
            "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        },
    }


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shared_memory() -> dict[str, int | None]:
    try:
        disk = os.statvfs("/dev/shm")
    except OSError:
        return {"shm_total": None, "shm_free": None}
    return {"shm_total": disk.f_blocks * disk.f_frsize, "shm_free": disk.f_bavail * disk.f_frsize}


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _shown(name: str, value: object) -> str:
    if value is None:
        return "[dim]not installed[/dim]" if name in _PACKAGES else "unlimited"
    if isinstance(value, int) and name.startswith(("memory_", "shm_", "locked_")):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    return str(value)
