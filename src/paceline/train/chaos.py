"""Faults done on demand to the worker that asks: real signals, real hangs, real memory kills.

The loop calls `at` whenever it enters a phase, `slow` after each shard and `corrupt` once a step; without
faults for this worker each of them is one comparison. Which fault is due is core/faults.py's; here is only
how it is done. Must not know the loop.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import final

from paceline.core.chaos import Chaos, Fault
from paceline.core.faults import PHASES, WAIT
from paceline.engines.local import memory_group

_log = logging.getLogger(__name__)

_ELSEWHERE = ("slow", "corrupt")  # not done when a phase begins
_OOM_LIMIT = 64 << 20
_OOM_PIECE = 1 << 20
_OOM_SECONDS = 1.5  # in its group before the end, so that whoever looks after the worker has seen it there
_MUTEX_BYTES = 64  # zeros are an unlocked mutex to Linux's C libraries


class InjectedError(RuntimeError):
    """What the fault `raise` raises."""


@final
class Injector:
    """The faults of one life of one worker. `mute(seconds)` keeps its control connection silent for so long;
    steps are counted from 1, the number that they will have once committed."""

    def __init__(
        self,
        chaos: Chaos | None,
        *,
        slot: int,
        attempt: int = 1,
        mute: Callable[[float], None] | None = None,
    ) -> None:
        given = chaos or Chaos()
        self._slot, self._attempt = slot, attempt
        self._mute = mute
        self._due = [_Due(fault) for fault in given.faults if fault.meets(slot, attempt)]
        self._random = given.random
        self._armed = bool(self._due or self._random)
        self._step = 0
        self._cut_until = 0.0

    def at(self, phase: str, step: int) -> None:
        """The worker enters this phase of this step; may never return."""
        if not self._armed or phase not in PHASES:
            return
        if step != self._step:
            self._turn_to(step)
        if phase == "collective" and self._cut_until:
            self._wait_for_the_network()
        for due in self._due:
            fault = due.fault
            # Waiting for the others is no part of a step: a fault comes there only if it says so.
            here = fault.phase == phase or (fault.phase is None and phase != WAIT)
            if here and fault.kind not in _ELSEWHERE and due.take(step):
                self._do(fault, phase)

    def slow(self, seconds: float) -> float:
        """A shard took so long; a straggler takes longer: by so many seconds."""
        if not self._armed:
            return 0.0
        extra = seconds * sum((due.fault.factor or 1.0) - 1.0 for due in self._due if due.slows(self._step))
        if extra > 0.0:
            time.sleep(extra)
        return extra

    def corrupt(self, step: int) -> bool:
        """Whether a bit of this worker's gradient is to flip in this step."""
        if not self._armed:
            return False
        if step != self._step:
            self._turn_to(step)
        taken = [due for due in self._due if due.fault.kind == "corrupt" and due.take(step)]
        for due in taken:
            self._say(due.fault, "gradient")
        return bool(taken)

    def _turn_to(self, step: int) -> None:
        if self._step == 0 and self._attempt == 1:
            # Whoever begins later than a fault's step was not there to meet it.
            self._due = [due for due in self._due if due.fault.step is None or due.fault.step >= step]
        self._step = step
        # A step that is done again after a repair has been drawn for already.
        if not any(due.drawn and due.fault.step == step for due in self._due):
            drawn = [faults.draw(step, self._slot, self._attempt) for faults in self._random]
            self._due = [due for due in self._due if not due.drawn]
            self._due += [_Due(fault, drawn=True) for fault in drawn if fault is not None]

    def _do(self, fault: Fault, phase: str) -> None:
        self._say(fault, phase)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(1 if fault.code is None else fault.code)
            case "raise":
                raise InjectedError(f"chaos: {fault}, in phase {phase} of step {self._step}")
            case "stop":
                stop_this_process(fault.seconds)
            case "hang":
                hang(fault.seconds)
            case "deadlock":
                deadlock(fault.seconds)
            case "partition":
                self._cut(fault.seconds or 0.0)
                if phase == "collective":
                    self._wait_for_the_network()
            case "oom":
                run_out_of_memory()
            case "leave":
                os.kill(os.getpid(), signal.SIGTERM)

    def _cut(self, seconds: float) -> None:
        self._cut_until = time.monotonic() + seconds
        if self._mute is not None:
            self._mute(seconds)

    def _wait_for_the_network(self) -> None:
        hang(self._cut_until - time.monotonic())
        self._cut_until = 0.0

    def _say(self, fault: Fault, phase: str) -> None:
        _log.warning(
            "chaos: %s meets rank %d (pid %d) in phase %s of step %d",
            fault,
            self._slot,
            os.getpid(),
            phase,
            self._step,
        )


@final
class _Due:
    """A fault and how often it may still come in this life."""

    def __init__(self, fault: Fault, *, drawn: bool = False) -> None:
        self.fault = fault
        self.drawn = drawn
        self._left = 1 if fault.times is None or fault.ends_a_life else fault.times
        self._last_step = -1
        self._began: tuple[int, float] | None = None

    def take(self, step: int) -> bool:
        """Whether it comes now; once a step at most."""
        if self._left == 0 or step < (self.fault.step or 0) or step == self._last_step:
            return False
        self._left -= 1
        self._last_step = step
        return True

    def slows(self, step: int) -> bool:
        fault = self.fault
        if fault.kind != "slow" or step < (fault.step or 0):
            return False
        if self._began is None:
            self._began = (step, time.monotonic())
        first, since = self._began
        return (fault.times is None or step < first + fault.times) and (
            fault.seconds is None or time.monotonic() < since + fault.seconds
        )


def hang(seconds: float | None) -> None:
    """This thread does nothing, for so long or for ever; the others go on."""
    until = None if seconds is None else time.monotonic() + seconds
    while until is None or time.monotonic() < until:
        time.sleep(3600.0 if until is None else max(0.0, until - time.monotonic()))


def deadlock(seconds: float | None) -> None:
    """This thread waits for a lock that it holds, without giving Python's lock back: every thread stands."""
    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps Python's lock during the call
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    if seconds is None:
        libc.pthread_mutex_lock(mutex)
    else:
        whole, part = divmod(time.time_ns() + int(seconds * 1e9), 1_000_000_000)
        libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(whole, part))
    libc.pthread_mutex_unlock(mutex)


def stop_this_process(seconds: float | None) -> None:
    """SIGSTOP; another process lets this one go on after so long."""
    waker = None
    if seconds is not None:
        waker = subprocess.Popen(
            ["sh", "-c", f"sleep {seconds:.3f}; kill -CONT {os.getpid()}"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    os.kill(os.getpid(), signal.SIGSTOP)
    if waker is not None:
        waker.wait()


def run_out_of_memory() -> None:
    """Has the kernel kill this process for memory, in a group of its own with a small limit; where no such
    group can be made, a MemoryError is raised, and the machine is left in peace."""
    try:
        group = memory_group.make_below(f"paceline-oom-{os.getpid()}", _OOM_LIMIT)
    except OSError as error:
        raise MemoryError(
            f"chaos: no memory group can be made here ({error}), so this is only raised"
        ) from None
    # Whoever is in the group cannot remove it: this one does when the pipe to it closes, with our death.
    remover = subprocess.Popen(
        [
            "sh",
            "-c",
            'read _; for s in 0.01 0.02 0.05 0.1 0.2 0.5 1; do rmdir "$0" 2>&- && exit; sleep $s; done',
            group.path,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        group.enter()
        time.sleep(_OOM_SECONDS)
        taken = [bytearray(b"x" * _OOM_PIECE) for _ in range(4 * _OOM_LIMIT // _OOM_PIECE)]
    except OSError as error:
        remover.communicate()
        raise MemoryError(f"chaos: this process may not enter a memory group: {error}") from None
    raise MemoryError(f"chaos: {len(taken)} MiB were used, and the kernel did not mind")
