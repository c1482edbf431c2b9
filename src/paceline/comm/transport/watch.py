"""The slow path of every wait: look around, say for whom, give up with a reason.

A wait that lasts longer than a moment enters a `Watch`: the rank's status becomes readable for its peers,
everybody's status is judged (calls.judge) every few hundredths of a second, and after three seconds one log
line says who waits for whom.
Knows the board of its transport, not what travels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from paceline.comm.calls import Peer, RankState, Status, disagreement, judge, ranks_text, timed_out
from paceline.core.errors import DisagreementError, PacelineError

_log = logging.getLogger("paceline.comm")

LOOK_SECONDS = 0.02
STABLE_SECONDS = 1.0
NOTICE_SECONDS = 3.0
SILENT_SECONDS = 0.5


class Outlook(Protocol):
    """Where statuses are posted and read."""

    rank: int

    def post(self, status: Status | None) -> None: ...
    def peers(self) -> dict[int, Peer]: ...


Widen = Callable[[Status], tuple[Outlook, Status]]


class Watch:
    """One long wait; a context manager around it."""

    def __init__(self, outlook: Outlook, status: Status, deadline: float) -> None:
        # Ranks that are part of a larger group look around in all of it, under their numbers there.
        widen: Widen | None = getattr(outlook, "widen", None)
        if widen is not None:
            outlook, status = widen(status)
        self._widen = widen
        self._outlook = outlook
        self._status = status
        self._deadline = deadline
        self._since = time.monotonic()
        self._seen: dict[int, Peer] = {}
        self._unchanged_since = self._since
        self._noticed = False
        self._doubted = False

    def __enter__(self) -> Watch:
        self._outlook.post(self._status)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the status stays readable: peers need it to come to the same judgement.
        if error is None:
            self._outlook.post(None)

    def update(self, status: Status) -> None:
        """Part of what was waited for has come: say what is still missing."""
        if self._widen is not None:
            _, status = self._widen(status)
        if status != self._status:
            self._status = status
            self._outlook.post(status)

    def reassure(self) -> None:
        """Something came: what looked hopeless a moment ago has to be looked at afresh."""
        self._doubted = False

    def look(self) -> bool:
        """Raises if the wait cannot end well or has lasted too long; False: check what is waited for and
        look again, without a pause."""
        now = time.monotonic()
        peers = self._outlook.peers()
        if peers != self._seen:
            self._seen, self._unchanged_since = peers, now
        error = judge(self._outlook.rank, peers, stable=now - self._unchanged_since >= STABLE_SECONDS)
        if error is not None and not self._too_early(error, peers, now):
            # A peer may have done its part and left since the caller last checked: it checks once more.
            if self._doubted or now >= self._deadline:
                try:
                    raise error
                finally:
                    del error  # or it and this frame, with all that it knows, would hold each other
            self._doubted = True
            return False
        self._doubted = False
        if now >= self._deadline:
            self._outlook.post(None)
            raise timed_out(self._outlook.rank, peers, self._status, now - self._since)
        if not self._noticed and now - self._since >= NOTICE_SECONDS:
            self._noticed = True
            absent = [rank for rank in self._status.waits_for if peers[rank].status is None]
            whom = ranks_text(absent or self._status.waits_for)
            _log.warning("rank %d waits for %s in %s", self._outlook.rank, whom, self._status)
        return True

    def _too_early(self, error: PacelineError, peers: dict[int, Peer], now: float) -> bool:
        """Ranks that came a moment ago have not said what they called: a listing would blame them."""
        coming = (RankState.ABSENT, RankState.RUNNING)
        silent = any(peer.state in coming and peer.status is None for peer in peers.values())
        return isinstance(error, DisagreementError) and silent and now - self._since < SILENT_SECONDS

    def disagree(self, headline: str, patience: float = SILENT_SECONDS) -> None:
        """Raises a DisagreementError once the peers have said what they called, or after `patience`
        seconds."""
        end = time.monotonic() + patience
        peers = self._outlook.peers()
        while time.monotonic() < end and any(
            peer.status is None and peer.state is RankState.RUNNING for peer in peers.values()
        ):
            time.sleep(LOOK_SECONDS)
            peers = self._outlook.peers()
        raise judge(self._outlook.rank, peers, stable=False) or disagreement(
            self._outlook.rank, peers, headline
        )
