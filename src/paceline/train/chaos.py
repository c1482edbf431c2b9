"""Faults done on demand to the worker that asks: real signals, real hangs, real memory kills.

The loop calls `at` whenever it enters a phase, `slow` after each shard and `corrupt` once a step; without
faults for this worker each of them is one comparison. Which fault is due is core/faults.py's; here is only
how it is done, and that it is announced before it is done: a fault for which no life is named must not come
again in another life. Must not know the loop, nor who hears of it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol, final

from paceline.core.chaos import Chaos, Fault, RandomFaults
from paceline.core.events import FaultInjected
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


class Announce(Protocol):
    """Says that a fault is about to act, and whether that is known now, whatever becomes of this process.
    `before` is how often it acted in this life; one that is `once` in a run acts only if it is known."""

    def __call__(self, event: FaultInjected, before: int, *, once: bool) -> bool: ...


@final
class Injector:
    """The faults of one life of one worker. `mute(seconds)` keeps its control connection silent for so long;
    steps are counted from 1, the number that they will have once committed. Without `announce` nobody is told
    of a fault."""

    def __init__(
        self,
        chaos: Chaos | None,
        *,
        slot: int,
        attempt: int = 1,
        mute: Callable[[float], None] | None = None,
        announce: Announce | None = None,
    ) -> None:
        parts = list(enumerate((chaos or Chaos()).parts))
        self._slot, self._attempt = slot, attempt
        self._mute, self._announce = mute, announce
        self._due = [
            _Due(part, index)
            for index, part in parts
            if isinstance(part, Fault) and part.meets(slot, attempt)
        ]
        self._random = [(index, part) for index, part in parts if isinstance(part, RandomFaults)]
        self._armed = bool(self._due or self._random)
        self._step = 0
        self._phase = PHASES[0]
        self._cut_until = 0.0

    def has_met(self, met: Sequence[int]) -> None:
        """What earlier lives of this rank met, by its place in the chaos, each as often: it does not come
        again, unless it names its lives."""
        for due in self._due:
            if due.fault.attempt is None:
                due.left -= met.count(due.index)

    def at(self, phase: str, step: int) -> None:
        """The worker enters this phase of this step; may never return."""
        if not self._armed or phase not in PHASES:
            return
        if step != self._step:
            self._turn_to(step)
        self._phase = phase
        if phase == "collective" and self._cut_until:
            self._wait_for_the_network()
        for due in self._due:
            fault = due.fault
            # Waiting for the others is no part of a step: a fault comes there only if it says so.
            here = fault.phase == phase or (fault.phase is None and phase != WAIT)
            if here and fault.kind not in _ELSEWHERE and self._takes(due):
                if fault.after:
                    self._do_later(fault, phase)
                else:
                    self._do(fault, phase)

    def _do_later(self, fault: Fault, phase: str) -> None:
        """Send the fault's signal from another thread, so that it meets this worker in the middle of what
        follows: between two exchanges of a step, say, where no phase begins."""
        timer = threading.Timer(fault.after or 0.0, self._do, (fault, phase))
        timer.daemon = True
        timer.start()

    def slow(self, seconds: float) -> float:
        """A shard took so long; a straggler takes longer: by so many seconds."""
        if not self._armed:
            return 0.0
        extra = seconds * sum((due.fault.factor or 1.0) - 1.0 for due in self._due if self._slows(due))
        if extra > 0.0:
            time.sleep(extra)
        return extra

    def corrupt(self, step: int) -> bool:
        """Whether a bit of this worker's gradient is to flip in this step."""
        if not self._armed:
            return False
        if step != self._step:
            self._turn_to(step)
        return bool([due for due in self._due if due.fault.kind == "corrupt" and self._takes(due)])

    def _turn_to(self, step: int) -> None:
        if self._step == 0 and self._attempt == 1:
            # Whoever begins later than a fault's step was not there to meet it.
            self._due = [due for due in self._due if due.fault.step is None or due.fault.step >= step]
        self._step = step
        # A step that is done again after a repair has been drawn for already.
        if not any(due.drawn and due.fault.step == step for due in self._due):
            self._due = [due for due in self._due if not due.drawn]
            for index, faults in self._random:
                fault = faults.draw(step, self._slot, self._attempt)
                if fault is not None:
                    self._due.append(_Due(fault, index, drawn=True))

    def _takes(self, due: _Due) -> bool:
        """Whether the fault comes now. One that is to come once in a run is put off to the next chance while
        nobody knows that it came: it may be the end of this process, and the next life would meet it too."""
        if not due.is_due(self._step):
            return False
        fault, once = due.fault, due.fault.attempt is None
        event = FaultInjected(
            time=time.time(),
            rank=self._slot,
            step=self._step,
            phase=self._phase,
            fault=str(fault),
            index=due.index,
        )
        known = self._announce is None or self._announce(event, due.taken, once=once)
        if once and not known:
            return False
        due.take(self._step)
        self._say(fault)
        return True

    def _slows(self, due: _Due) -> bool:
        fault, step = due.fault, self._step
        if fault.kind != "slow":
            return False
        if due.began is None:
            if not self._takes(due):
                return False
            due.began = (step, time.monotonic())
        first, since = due.began
        return (fault.times is None or step < first + fault.times) and (
            fault.seconds is None or time.monotonic() < since + fault.seconds
        )

    def _do(self, fault: Fault, phase: str) -> None:
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

    def _say(self, fault: Fault) -> None:
        _log.warning(
            "chaos: %s meets rank %d (pid %d) in phase %s of step %d",
            fault,
            self._slot,
            os.getpid(),
            self._phase,
            self._step,
        )


@final
class _Due:
    """A fault, its place in the chaos, how often it came in this life and may still come."""

    def __init__(self, fault: Fault, index: int, *, drawn: bool = False) -> None:
        self.fault, self.index = fault, index
        self.drawn = drawn
        # In lives that are named, what ends one comes once in each; slow begins once, and lasts.
        single = fault.kind == "slow" or (fault.ends_a_life and fault.attempt is not None)
        self.left = 1 if single else fault.times or 1
        self.taken = 0
        self.began: tuple[int, float] | None = None
        self._last_step = -1

    def is_due(self, step: int) -> bool:
        """Whether it comes now; once a step at most."""
        return self.left > 0 and step >= (self.fault.step or 0) and step != self._last_step

    def take(self, step: int) -> None:
        self.left -= 1
        self.taken += 1
        self._last_step = step


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
