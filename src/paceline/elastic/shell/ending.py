"""The end of a job: workers are let go, waited for and, if need be, killed; then the caller is told.

Must not decide that the job ends, nor how.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Final, final

from paceline.core.control import address
from paceline.core.events import RunFailed
from paceline.core.system_calls import memory_file
from paceline.elastic.model import HOME, EndJob
from paceline.elastic.shell.seats import Seat

if TYPE_CHECKING:
    from paceline.elastic.supervisor import Supervisor

# After a good end workers pack their results and close their files; after a bad one nothing is worth a wait.
GOOD_SECONDS: Final = 60.0
BAD_SECONDS: Final = 5.0
_KILL_SECONDS: Final = 10.0


@final
class Ending:
    """`over` when all workers are gone and the outcome was told."""

    def __init__(self, supervisor: Supervisor, end: EndJob, *, at_once: bool = False) -> None:
        self._supervisor = supervisor
        self._end = end
        seconds = 0.0 if at_once else GOOD_SECONDS if end.ok else BAD_SECONDS
        self._limit = time.monotonic() + seconds
        self._killed = False
        self.over = False
        # While those who told it are still there: once they are gone nobody can tell it again.
        supervisor.chronicle.flush(over=True)
        for seat in list(supervisor.staff.seats.values()):
            if not at_once:
                # Their time is counted here.
                supervisor.actions.dismiss(seat, end.reason, 0, 2 * GOOD_SECONDS)
                if seat.hello is None:
                    # It has not even begun: nothing of it is worth a wait.
                    supervisor.staff.kill(seat, end.reason)

    @property
    def due(self) -> float:
        return self._limit

    def tick(self, now: float) -> None:
        """See who is left."""
        staff = self._supervisor.staff
        waited_for = any(not _is_out_of_reach(seat) for seat in staff.seats.values())
        if waited_for and now >= self._limit:
            if self._killed:
                # Not even SIGKILL ends them: they wait for the kernel. The fork server will.
                self._finish()
                return
            self._killed = True
            self._limit = now + _KILL_SECONDS
            for seat in list(staff.seats.values()):
                staff.kill(seat, "the job is over")
        if not waited_for:
            self._finish()

    def _finish(self) -> None:
        supervisor, end = self._supervisor, self._end
        staff = supervisor.staff
        supervisor.places.close(end.reason)
        if not end.ok:
            step = supervisor.chronicle.journaled
            supervisor.chronicle.write(RunFailed(time=time.time(), step=step, reason=end.reason))
        supervisor.chronicle.flush(over=True)
        files: list[int] = []
        result = self._place_result(files) if end.ok else None
        failure = None
        if end.failed is not None and end.failed in staff.deaths.failures:
            failure = list(range(len(files), len(files) + len(staff.deaths.failures[end.failed])))
            files += staff.deaths.failures[end.failed]
        blamed = staff.find(end.failed) if end.failed is not None else None
        facts: dict[str, Any] = {
            "ok": end.ok,
            "reason": end.reason,
            "stopped": end.stopped,
            "result": result,
            "failure": failure,
            "rank": blamed.slot if blamed is not None else None,
            "pid": blamed.pid if blamed is not None else None,
            "text": "" if end.ok else supervisor.verdicts.last_text,
        }
        told = memory_file("paceline-outcome")
        os.write(told, json.dumps(facts).encode())
        supervisor.memory.forget()
        address.remove(supervisor.folder)
        supervisor.caller.say("ended", (told, *files))
        self.over = True

    def _place_result(self, files: list[int]) -> int | None:
        """The first member's result, else that of the next that has one."""
        # The machine's view: it outlives a supervisor, and not every rank sends all of the result.
        staff, view = self._supervisor.staff, self._supervisor.state.view
        order = list(view.members) if view is not None else []
        for member in [*order, *staff.deaths.results]:
            if member in staff.deaths.results:
                files += staff.deaths.results[member][:1]
                return len(files) - 1
        return None


def _is_out_of_reach(seat: Seat) -> bool:
    """On another machine, and cut off or not there yet: its agent ends it when it hears of the end."""
    return seat.place != HOME and (seat.expelled or seat.hello is None)
