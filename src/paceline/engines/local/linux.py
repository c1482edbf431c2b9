"""Linux calls that Python's os module lacks, and facts about this process from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

from paceline.core import process_state

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as `parent_pid` (which forked it) is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # The parent ended before the kernel watched it.
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent has ended, so that none can slip away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def own_children() -> list[int]:
    """Return the process ids of this process's children, zombies included."""
    children: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            children += map(int, (task / "children").read_text().split())
    return children


def own_thread_count() -> int:
    """Return the threads of this process as the kernel counts them, those of C libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def kill_process_group(pid: int) -> None:
    """Kill the process and everything in the process group it leads."""
    for target, kill in ((pid, os.kill), (pid, os.killpg)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(target, signal.SIGKILL)


def kill_orphans_of(pid: int) -> None:
    """Kill what a process that has ended left in the group that it led. A number is not given to another
    process while a group has it, so where it stands for a living process the group is gone and it is not
    ours."""
    if process_state.has_ended(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"prctl({option})")
