"""How workers' processes ended, and what they left: results, reports, exceptions.

Must not know who is told, nor what follows from it.
"""

from __future__ import annotations

import os
import signal
from typing import Final, final

from paceline.core.errors import PacelineError
from paceline.elastic.model import HasRaised, Lost
from paceline.elastic.shell.seats import Seat, how_it_ended
from paceline.engines.local import payload, report
from paceline.engines.local.memory_kill import MemoryWatch

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

    def ended(self, seat: Seat, status: int | None, told: str) -> HasRaised | Lost | None:
        """What to say about a process that is gone; None where it was to end, or has said why itself."""
        failed = self._take_files(seat)
        if seat.dismissed or seat.raised is not None or (seat.done and status == 0):
            self._memory.forget(seat.pid)
            return None
        if failed and status is not None:
            said = payload.load(failed[0])
            if isinstance(said, report.Report):
                return HasRaised(seat.member, said.summary, said.fault, 0, -1)
        if status is None:
            return Lost(seat.member, "crash", told or "the process is gone; nobody saw how it ended")
        return self._lost(seat, status, told)

    def drop_result(self, member: int) -> None:
        """Nobody wants what this worker returned."""
        for file in self.results.pop(member, ()):
            os.close(file)

    def close(self) -> None:
        """Give back all files."""
        for held in (self.results, self.failures):
            for files in held.values():
                for file in files:
                    os.close(file)
            held.clear()

    def _lost(self, seat: Seat, status: int, told: str) -> Lost:
        kind, reason = how_it_ended(status)
        here = seat.worker is not None
        memory = self._memory.verdict(seat.pid) if status == -signal.SIGKILL and here else None
        if memory is not None:
            return Lost(seat.member, "memory", memory)
        self._memory.forget(seat.pid)
        reason = told or reason
        frames = seat.worker.frames() if seat.worker is not None and status < 0 else []
        return Lost(seat.member, kind, f"{reason}; it was at {frames[0]}" if frames else reason)

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
