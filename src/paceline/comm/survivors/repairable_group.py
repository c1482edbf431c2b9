"""A group of processes that gets smaller when some die, at the request of its callers: who was lost, and the
group of those who are left.

Without a supervisor: each process finds out by itself (process_liveness.py), and all meet again
(survivor_meeting.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

from paceline.comm.context import DistributedContext
from paceline.comm.survivors.survivor_meeting import SurvivorMeeting
from paceline.core.errors import (
    GROUP_FAILURES,
    CommTimeoutError,
    CorruptDataError,
    DisagreementError,
    GroupInterruptedError,
    PeerError,
    PeerLostError,
    RankFailedError,
)
from paceline.core.wording import ranks

_log = logging.getLogger("paceline.comm")

# Mistakes of the program or faults of a machine, as long as all processes live.
_OTHER_CAUSES: Final = (DisagreementError, CorruptDataError, CommTimeoutError)
NOT_KNOWN: Final = -1


@final
class RepairableGroup:
    """One process's place in the group. `lost_rank` is the rank whose death is to be repaired, by the number
    that it had at first; None: the group stands."""

    def __init__(self, context: DistributedContext, meeting: SurvivorMeeting) -> None:
        self.context, self._meeting = context, meeting
        self.lost_rank: int | None = None

    def fail(self, error: PeerError | CommTimeoutError) -> None:
        """Leave the group, in which an exchange has failed, because a process died; raise the error where all
        live and the cause is another one."""
        gone = self._meeting.gone()
        if not gone and isinstance(error, _OTHER_CAUSES):
            raise error
        named = error.rank if isinstance(error, PeerLostError | RankFailedError) else None
        self.lost_rank = gone[0] if gone else NOT_KNOWN if named is None else named
        # Others may wait for this process in the same exchange.
        self.context.close(error)
        _log.warning("rank %d is lost: %s", self.lost_rank, error.message.rstrip(":"))

    @property
    def needs_repair(self) -> bool:
        return self.lost_rank is not None or bool(self._meeting.gone())

    def repair(self, take_over: Callable[[DistributedContext], object]) -> None:
        """Meet the others that live in another group, and have `take_over` bring all of them to one state in
        it; again, where another process dies meanwhile."""
        before, attempts = self._meeting.ranks, 0
        self.context.close(GroupInterruptedError("the group changes"))
        while True:
            self.context = self._meeting.meet()
            try:
                take_over(self.context)
                break
            except GROUP_FAILURES as error:
                self.context.close(error)
                attempts += 1
                if attempts > len(before):
                    raise  # more often than processes can have died
        self.lost_rank = None
        if self.context.is_master:
            dead = ranks(set(before) - set(self.context.labels), "is", "are", all_named=True)
            rest = ranks(self.context.labels, "continues", "continue", all_named=True)
            _log.warning("%s gone: %s", dead, rest)

    def close(self, kept: DistributedContext | None = None) -> None:
        """Leave the group: the others see this process as gone. `kept` is not closed: another owns it."""
        self._meeting.close()
        if self.context is not kept:
            self.context.close()
