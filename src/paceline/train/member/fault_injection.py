"""Inject faults into this worker on demand: real signals, real hangs, real memory kills.

The loop calls `at` whenever it enters a phase, `slow` after each shard and `corrupt` once a step; without
faults for this worker each of them is one comparison. core/faults.py decides which fault is due. A fault is
announced before it acts: one that names no attempt must not come again in the worker that replaces this one.
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

from paceline.core import memory_cgroup
from paceline.core.chaos_spec import Chaos, Fault, RandomFaults
from paceline.core.clock import Clock, MonotonicClock
from paceline.core.events import FaultInjected
from paceline.core.faults import PHASES, WAIT

_log = logging.getLogger(__name__)

_ELSEWHERE = ("slow", "corrupt")  # not done when a phase begins
_OOM_LIMIT = 64 << 20
_OOM_PIECE = 1 << 20
_OOM_SECONDS = 1.5  # in its cgroup before the end, so that the supervisor has seen it there
_MUTEX_BYTES = 64  # zeros are an unlocked mutex to Linux's C libraries


class InjectedError(RuntimeError):
    """Raised by the fault `raise`."""


class FaultAnnouncer(Protocol):
    """Announce a fault that is about to act; True: the supervisor knows, whatever becomes of this process.
    `before`: how often it acted in this process. A fault that is `once` in a run acts only if it is known."""

    def __call__(self, event: FaultInjected, before: int, *, once: bool) -> bool: ...


@final
class FaultInjector:
    """The faults of one worker process. `mute(seconds)` silences its control connection; steps are counted
    from 1, the number that they will have once committed. Without `announce` no fault is announced. `clock`:
    on which delays, hangs and partitions last."""

    def __init__(
        self,
        chaos: Chaos | None,
        *,
        slot: int,
        attempt: int = 1,
        mute: Callable[[float], None] | None = None,
        announce: FaultAnnouncer | None = None,
        clock: Clock | None = None,
    ) -> None:
        parts = list(enumerate((chaos or Chaos()).parts))
        self._slot, self._attempt = slot, attempt
        self._mute, self._announce = mute, announce
        self._clock: Clock = clock or MonotonicClock()
        self._due = [
            _PendingFault(part, index)
            for index, part in parts
            if isinstance(part, Fault) and part.meets(slot, attempt)
        ]
        self._random = [(index, part) for index, part in parts if isinstance(part, RandomFaults)]
        self._armed = bool(self._due or self._random)
        self._step = 0
        self._phase = PHASES[0]
        self._cut_until = 0.0

    def has_met(self, met: Sequence[int]) -> None:
        """Leave out what earlier workers of this rank met: indices in the chaos, each as often as it came. A
        fault that names its attempts comes in each of them."""
        for due in self._due:
            if due.fault.attempt is None:
                due.left -= met.count(due.index)

    def at(self, phase: str, step: int) -> None:
        """Inject what is due as the worker enters this phase; may never return."""
        if not self._armed or phase not in PHASES:
            return
        if step != self._step:
            self._turn_to(step)
        self._phase = phase
        if phase == "collective" and self._cut_until:
            self._wait_for_the_network()
        for due in self._due:
            fault = due.fault
            # Waiting for a view is no part of a step: a fault comes there only if it names this phase.
            here = fault.phase == phase or (fault.phase is None and phase != WAIT)
            if here and fault.kind not in _ELSEWHERE and self._takes(due):
                if not fault.after:
                    self._inject(fault, phase)
                    continue
                # From another thread, in the middle of what follows: between two exchanges of a step, for
                # example, where no phase begins.
                timer = threading.Timer(fault.after, self._inject, (fault, phase))
                timer.daemon = True
                timer.start()

    def slow(self, seconds: float) -> float:
        """Delay a straggler whose shard took `seconds`; return the delay."""
        if not self._armed:
            return 0.0
        extra = seconds * sum((due.fault.factor or 1.0) - 1.0 for due in self._due if self._slows(due))
        if extra > 0.0:
            self._clock.sleep(extra)
        return extra

    def corrupt(self, step: int) -> bool:
        """Return whether a bit of this worker's gradient flips in this step."""
        if not self._armed:
            return False
        if step != self._step:
            self._turn_to(step)
        # A list, not any(): every fault that is due is taken.
        return bool([due for due in self._due if due.fault.kind == "corrupt" and self._takes(due)])

    def _turn_to(self, step: int) -> None:
        if self._step == 0 and self._attempt == 1:
            # A worker that begins after a fault's step was not there to meet it.
            self._due = [due for due in self._due if due.fault.step is None or due.fault.step >= step]
        self._step = step
        # A step that is done again after a repair has been drawn for already.
        if not any(due.drawn and due.fault.step == step for due in self._due):
            self._due = [due for due in self._due if not due.drawn]
            for index, faults in self._random:
                fault = faults.draw(step, self._slot, self._attempt)
                if fault is not None:
                    self._due.append(_PendingFault(fault, index, drawn=True))

    def _takes(self, due: _PendingFault) -> bool:
        """Return whether to inject the fault now. A fault that is injected once in a run is postponed while
        the supervisor does not know of it: it may end this process, and the replacement would inject it
        again."""
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
        where = (self._slot, os.getpid(), self._phase, self._step)
        _log.warning("chaos: %s meets rank %d (pid %d) in phase %s of step %d", fault, *where)
        return True

    def _slows(self, due: _PendingFault) -> bool:
        fault, step = due.fault, self._step
        if fault.kind != "slow":
            return False
        if due.began is None:
            if not self._takes(due):
                return False
            due.began = (step, self._clock.now())
        first, since = due.began
        return (fault.times is None or step < first + fault.times) and (
            fault.seconds is None or self._clock.now() < since + fault.seconds
        )

    def _inject(self, fault: Fault, phase: str) -> None:
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
                hang(fault.seconds, self._clock)
            case "deadlock":
                deadlock(fault.seconds)
            case "partition":
                seconds = fault.seconds or 0.0
                self._cut_until = self._clock.now() + seconds
                if self._mute is not None:
                    self._mute(seconds)
                if phase == "collective":
                    self._wait_for_the_network()
            case "oom":
                run_out_of_memory()
            case "leave":
                os.kill(os.getpid(), signal.SIGTERM)

    def _wait_for_the_network(self) -> None:
        hang(self._cut_until - self._clock.now(), self._clock)
        self._cut_until = 0.0


@final
class _PendingFault:
    """A fault, its index in the chaos, how often it came in this process and may still come."""

    def __init__(self, fault: Fault, index: int, *, drawn: bool = False) -> None:
        self.fault, self.index = fault, index
        self.drawn = drawn
        # Where attempts are named, a fault that ends the process comes once in each; slow begins once.
        single = fault.kind == "slow" or (fault.ends_a_life and fault.attempt is not None)
        self.left = 1 if single else fault.times or 1
        self.taken = 0
        self.began: tuple[int, float] | None = None
        self._last_step = -1

    def is_due(self, step: int) -> bool:
        """Return whether it comes now; at most once a step."""
        return self.left > 0 and step >= (self.fault.step or 0) and step != self._last_step

    def take(self, step: int) -> None:
        self.left -= 1
        self.taken += 1
        self._last_step = step


def hang(seconds: float | None, clock: Clock) -> None:
    """Block this thread, for `seconds` or for ever; the other threads run."""
    until = None if seconds is None else clock.now() + seconds
    while until is None or clock.now() < until:
        clock.sleep(3600.0 if until is None else until - clock.now())


def deadlock(seconds: float | None) -> None:
    """Wait for a lock that this thread holds, with the interpreter's lock: every thread stands."""
    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the interpreter's lock during the call
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)
    libc.pthread_mutex_lock(mutex)
    if seconds is None:
        libc.pthread_mutex_lock(mutex)
    else:
        whole, part = divmod(time.time_ns() + int(seconds * 1e9), 1_000_000_000)
        libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(whole, part))
    libc.pthread_mutex_unlock(mutex)


def stop_this_process(seconds: float | None) -> None:
    """Stop with SIGSTOP; another process sends SIGCONT after `seconds`."""
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
    """Let the kernel kill this process for memory, in a cgroup with a small limit. Where none can be made,
    raise MemoryError: the host's memory is not touched."""
    try:
        group = memory_cgroup.make_cgroup_below(f"paceline-oom-{os.getpid()}", _OOM_LIMIT)
    except OSError as error:
        raise MemoryError(
            f"chaos: no memory group can be made here ({error}), so this is only raised"
        ) from None
    # A process cannot remove the cgroup that it is in, and will not be there to do it: another process waits
    # for the end of the pipe, which the kernel closes at this one's death. It is started before the limit
    # applies, in another session, so that neither the memory kill nor a kill of the worker's group can
    # reach it; and it tries several times, because the kernel empties the group a little after the death.
    again = 'read _; for s in 0.01 0.02 0.05 0.1 0.2 0.5 1; do rmdir "$0" 2>&- && exit; sleep $s; done'
    remover = subprocess.Popen(
        ["sh", "-c", again, group.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        group.enter()
        # The supervisor tells a memory kill from any other SIGKILL by the counter of the group that the
        # worker was last seen in: it needs the time to see the worker there.
        time.sleep(_OOM_SECONDS)
        # Written to, in pieces: memory that is only reserved is not counted. Four times the limit: where swap
        # cannot be turned off, a part of it goes there.
        taken = [bytearray(b"x" * _OOM_PIECE) for _ in range(4 * _OOM_LIMIT // _OOM_PIECE)]
    except OSError as error:
        # The pipe closes here, and the empty group is removed at once.
        remover.communicate()
        raise MemoryError(f"chaos: this process may not enter a memory group: {error}") from None
    raise MemoryError(f"chaos: {len(taken)} MiB were used, and the kernel did not mind")
