"""Decide whether the kernel killed a process because memory ran out.

A kill for memory is a SIGKILL like any other. What distinguishes them are counters of the kernel, one of the
machine and one of each memory cgroup, which are remembered while processes live, and the kernel's log where
it may be read. Asking about a death when no counter rose costs one small read.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from paceline.core.available_resources import read_text
from paceline.core.memory_cgroup import MemoryCgroup, cgroup_of

_VMSTAT = Path("/proc/vmstat")
_LOG = "/dev/kmsg"
_LOG_RECORD = 8192
_LOG_SECONDS = 60.0
_KILLED = re.compile(r"Killed process (\d+) ")
_LIMIT = re.compile(r"memory: usage \d+kB, limit (\d+)kB")
# The counter moves when the kernel decides, a little before the process is gone and noticed to be.
_WINDOW_SECONDS = 5.0
_EVERY_SECONDS = 0.5
# The number of the first namespace of process numbers, the one that the kernel's log speaks of.
_FIRST_NAMESPACE = 0xEFFFFFFC


@final
class OomWatch:
    """Watch of processes for kills for memory: `note` while a process lives, `explain` after it died by
    SIGKILL. Not for several threads at once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._machine = _Counter(_machine_kills(), clock())
        self._looked = clock()
        self._groups: dict[Path, _Counter] = {}
        self._of: dict[int, MemoryCgroup] = {}
        self._limits: dict[int, int | None] = {}  # as they were: a group may be gone with its last process

    def note(self, pid: int) -> None:
        """Remember the cgroup of a process: when it starts, and now and then, since it may move."""
        now = self._clock()
        if now - self._looked >= _EVERY_SECONDS:
            self._looked = now
            self._machine.look(_machine_kills(), now)
            for known in set(self._of.values()):
                self._groups[known.path].look(known.kills(), now)
        group = cgroup_of(pid)
        # One that is ending is shown at the top; what it was in before is what counts.
        if group is None or (group.path == group.top and pid in self._of):
            return
        if self._of.get(pid) != group:
            self._of[pid], self._limits[pid] = group, group.limit()
            if group.path not in self._groups:
                self._groups[group.path] = _Counter(group.kills(), now)

    def explain(self, pid: int) -> str | None:
        """Return a sentence if the kernel killed the process for memory, else None. Call once, soon after the
        death.

        The evidence, cheapest and weakest first: the machine's counter, the counter of the process's cgroup,
        the kernel's log. Each can only rule a kill for memory out, except the log, which names the process.
        """
        now = self._clock()
        group = self._of.get(pid)
        counter = None if group is None else self._groups.get(group.path)
        try:
            self._machine.look(_machine_kills(), now)
            # 1. No kill for memory on the whole machine within the window: another signal.
            if self._machine.known and not self._machine.rose():
                return None
            if group is not None and counter is not None:
                counter.look(group.kills(), now)
            # 2. The log names killed processes. Where it can be read and lacks this one: another process
            # died.
            logged = kills_in_log(time.monotonic())
            if logged is not None and pid not in logged:
                return None
            # 3. Without a log, a kill must have been counted in the process's cgroup. The machine's counter
            # alone decides only where the cgroup is gone with its last process, and its counter with it.
            here = counter is not None and counter.rose()
            still_there = group is not None and group.kills() is not None
            if not here and logged is None and (not self._machine.known or still_there):
                return None
            # One kill explains one death: the next death in the window needs another count.
            self._machine.claim()
            if counter is not None and here:
                counter.claim()
            return _sentence((logged or {}).get(pid) or self._limits.get(pid))
        finally:
            self.forget(pid)

    def forget(self, pid: int) -> None:
        """Forget a process that ended in another way."""
        group = self._of.pop(pid, None)
        self._limits.pop(pid, None)
        if group is not None and group not in self._of.values():
            self._groups.pop(group.path, None)


@final
class _Counter:
    """Values of a counter in the last seconds, and how many of its events have been accounted for."""

    def __init__(self, value: int | None, now: float) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._claimed = value or 0
        self.look(value, now)

    @property
    def known(self) -> bool:
        return bool(self._seen)

    def look(self, value: int | None, now: float) -> None:
        if value is None:
            return
        self._seen.append((now, value))
        # The newest that is older than the window stays: what is compared with.
        while len(self._seen) > 1 and self._seen[1][0] <= now - _WINDOW_SECONDS:
            self._seen.popleft()

    def rose(self) -> bool:
        return bool(self._seen) and self._seen[-1][1] > max(self._seen[0][1], self._claimed)

    def claim(self) -> None:
        """Assign one event to a death that it explains."""
        self._claimed = max(self._claimed, self._seen[0][1]) + 1 if self._seen else 0


def _machine_kills() -> int | None:
    _, found, after = read_text(_VMSTAT).partition("\noom_kill ")
    return int(after.split(None, 1)[0]) if found else None


def kills_in_log(now: float) -> dict[int, int | None] | None:
    """Return the processes that the kernel's log names as killed for memory lately, each with the limit in
    bytes that was reached; None where the log cannot be read or names none."""
    found: dict[int, int | None] = {}
    limit: int | None = None
    for seconds, text in _log_records():
        if seconds < now - _LOG_SECONDS:
            continue
        if usage := _LIMIT.match(text):
            limit = int(usage[1]) * 1024
        if killed := _KILLED.search(text):
            found[int(killed[1])] = limit if text.startswith("Memory cgroup") else None
            limit = None
    return found or None


def _log_records() -> Iterator[tuple[float, str]]:
    """Return the kernel's log, each line with its time on the monotonic clock; nothing where it cannot be
    read, or counts processes in another PID namespace."""
    try:
        if os.stat("/proc/self/ns/pid").st_ino != _FIRST_NAMESPACE:
            return
        log = os.open(_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        while True:
            try:
                record = os.read(log, _LOG_RECORD).decode(errors="replace")
            except BrokenPipeError:
                continue  # overwritten while it was read; the next read continues with the oldest left
            except OSError:
                return
            prefix, _, text = record.partition(";")
            yield int(prefix.split(",")[2]) / 1e6, text
    finally:
        os.close(log)


def _sentence(limit: int | None) -> str:
    if limit is not None:
        return f"killed by the kernel: out of memory (cgroup limit {limit / 2**20:.0f} MiB)"
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"killed by the kernel: out of memory (the machine has {machine / 2**30:.1f} GiB)"
