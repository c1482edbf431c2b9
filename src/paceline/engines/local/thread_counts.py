"""Thread counts of a rank's numeric libraries, so that ranks share the cores instead of fighting.

Libraries that are loaded are set by a call; those loaded later read the environment. The server itself is
started with one thread for each library, because a process must be single-threaded to fork safely.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import UsageError

SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

OPENBLAS_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def choose(asked: int | None, environ: Mapping[str, str], cores: int, workers: int) -> int:
    """Return the threads for one rank: `asked`, else OMP_NUM_THREADS, else an equal share of the cores."""
    if asked is not None:
        return asked
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not given:
        return max(1, cores // workers)
    if not given.isdecimal() or int(given) < 1:
        raise UsageError(
            f"the environment variable OMP_NUM_THREADS is {given!r}, which is not a number of threads",
            remedy="set it to a whole number from 1 up, unset it, or pass threads=",
        )
    return int(given)


def apply(count: int) -> None:
    """Set the libraries of this process, and through the environment those loaded later."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    for library in loaded("openblas"):
        handle = ctypes.CDLL(library)
        for name in OPENBLAS_SETTERS:
            setter = getattr(handle, name, None)
            if setter is not None:
                setter(count)
                break


def loaded(name: str) -> set[str]:
    """Return the shared libraries mapped into this process whose file name contains `name`."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if name in line}
    return {path for path in paths if name in Path(path).name and os.path.exists(path)}
