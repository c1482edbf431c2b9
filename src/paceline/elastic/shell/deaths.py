"""How workers' processes ended, and what they left: results, reports, exceptions.

Must not know who is told, nor what follows from it.
"""

from __future__ import annotations

import os
import signal
from typing import Final, final

from paceline.core.control.unheard import START_OVER_EXIT_CODE, SUPERVISOR_LOST_EXIT_CODE
from paceline.core.errors import PacelineError
from paceline.elastic.model import HasRaised, Lost
from paceline.elastic.shell.seats import Seat, how_it_ended
from paceline.engines.local import payload, report
from paceline.engines.local.memory_kill import MemoryWatch
from paceline.engines.local.worker import Worker

_KEPT: Final = 16


@final
class Deaths:
    """`results` and `failures` are files, by member; of failures the latest are kept."""

    def __init__(self) -> None:
        self._memory = MemoryWatch()
        self.results: dict[int, tuple[int, ...]] = {}
        self.failures: dict[int, tuple[int, ...]] = {}

    def note(self, pid: int) -> None:
        """A process lives: remember what its memory is limited by."""
        self._memory.note(pid)

    def refused(self, seat: Seat, error: PacelineError) -> HasRaised | Lost:
        """A worker was not started."""
        self.failures[seat.member] = payload.dump(report.describe(error)), payload.dump(error)
        if error.fault == "user":
            return HasRaised(seat.member, str(error), "user", 0, -1)
        return Lost(seat.member, "exit", f"it could not be started: {error.message}")

    def ended(
        self, seat: Seat, status: int | None, told: str, *, memory: bool = False
    ) -> HasRaised | Lost | None:
        """What to say about a process that is gone; None where it was to end, or has said why itself.
        `told`, and whether `memory` ran out, is what its own machine knows, where that is another."""
        failed = self._take_files(seat)
        if seat.dismissed or seat.raised is not None or (seat.done and status == 0):
            self._memory.forget(seat.pid)
            return None
        if status == SUPERVISOR_LOST_EXIT_CODE and seat.inherited and seat.hello is None:
            # Nobody was there to hear it: that is no error of its own, whatever its last exception was.
            self._memory.forget(seat.pid)
            self._drop(self.failures, seat.member)
            return Lost(seat.member, "unattended", "the supervisor stayed away, so it saved and left")
        if status == START_OVER_EXIT_CODE:
            self._memory.forget(seat.pid)
            return Lost(seat.member, "restart", "there is no checkpoint to go back to, so it starts over")
        if failed and status is not None:
            said = payload.load(failed[0])
            if isinstance(said, report.Report):
                return HasRaised(seat.member, said.summary, said.fault, 0, -1)
        if status is None:
            return Lost(seat.member, "crash", told or "the process is gone; nobody saw how it ended")
        return Lost(seat.member, "memory", told) if memory else self._lost(seat, status, told)

    def drop_result(self, member: int) -> None:
        """Nobody wants what this worker returned."""
        self._drop(self.results, member)

    def close(self) -> None:
        """Give back all files."""
        for held in (self.results, self.failures):
            for files in held.values():
                for file in files:
                    os.close(file)
            held.clear()

    def _lost(self, seat: Seat, status: int, told: str) -> Lost:
        kind, reason = how_it_ended(status)
        if seat.worker is None:
            return Lost(seat.member, kind, told or reason)
        memory, reason = how_it_died(seat.worker, status, self._memory)
        return Lost(seat.member, "memory" if memory else kind, told or reason)

    @staticmethod
    def _drop(held: dict[int, tuple[int, ...]], member: int) -> None:
        for file in held.pop(member, ()):
            os.close(file)

    def _take_files(self, seat: Seat) -> tuple[int, ...]:
        if seat.worker is None:
            return ()
        returned, failed = seat.worker.release()
        if returned:
            self.results[seat.member] = returned
        if failed:
            self.failures[seat.member] = failed
        while len(self.failures) > _KEPT:
            for file in self.failures.pop(next(iter(self.failures))):
                os.close(file)
        return failed


def how_it_died(worker: Worker, status: int, watch: MemoryWatch) -> tuple[bool, str]:
    """Of a process of this machine: whether the kernel killed it for memory, and a sentence. Ask once."""
    if status == -signal.SIGKILL:
        memory = watch.verdict(worker.pid)
        if memory is not None:
            return True, memory
    watch.forget(worker.pid)
    reason = how_it_ended(status)[1]
    frames = worker.frames() if status < 0 else []
    return False, f"{reason}; it was at {frames[0]}" if frames else reason
