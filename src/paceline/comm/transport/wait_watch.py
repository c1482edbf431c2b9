"""The slow path of every wait: post a status, judge those of the peers, give up with a reason.

A wait that lasts longer than a moment enters a `Watch`: the rank's status becomes readable for its peers, the
statuses of all ranks are judged (call_status.judge) every few hundredths of a second, and after three seconds
one log line names the ranks that are waited for. A rank whose threads wait for several things at once has
several watches: each judges its own wait, and peers read one of them (`OpenWaits`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, final

from paceline.comm.call_status import PeerState, RankState, Status, disagreement, judge, timed_out
from paceline.core.errors import DisagreementError, PacelineError
from paceline.core.wording import ranks

_log = logging.getLogger("paceline.comm")

LOOK_SECONDS = 0.02
STABLE_SECONDS = 1.0
NOTICE_SECONDS = 3.0
SILENT_SECONDS = 0.5
# The text of a call names every tensor of a list. An error lists the calls of all ranks.
_LONG_TEXT, _SHORT_TEXT = 2000, 300


class StatusChannel(Protocol):
    """Channel on which a rank posts what it waits for, and reads what the other ranks of its group do.

    `labels` has the number by which each rank is called in sentences and errors: its slot in a supervised
    job. `enclosing` is the channel of the larger group that these ranks are part of, if there is one: their
    waits are posted and judged there.
    """

    rank: int
    labels: Sequence[int]
    enclosing: StatusChannel | None

    def post(self, wait: object, status: Status | None) -> None:
        """Publish what a wait of this rank is for; None: it is over."""

    def forget(self, wait: object) -> None:
        """Take a wait that failed for over, and leave what the peers read as it is until the next `post`."""

    def peers(self) -> dict[int, PeerState]:
        """Return the states of all ranks, this one's included."""


@final
class OpenWaits:
    """The waits of one rank that are open at once, each in a thread of its own. The caller has a lock."""

    def __init__(self) -> None:
        self._statuses: dict[object, Status] = {}

    def put(self, wait: object, status: Status | None) -> Status | None:
        """Note what a wait is for, None when it is over; return the status that the peers should read."""
        if status is None:
            self.drop(wait)
        else:
            self._statuses[wait] = status
        # A collective concerns every rank, and peers compare it with their own call. Of messages, the last
        # one that was waited for: that is where the rank is.
        newest_first = reversed(self._statuses.values())
        return max(newest_first, key=lambda status: status.sequence >= 0, default=None)

    def drop(self, wait: object) -> None:
        self._statuses.pop(wait, None)


class Watch:
    """One long wait; a context manager around it.

    The one place where the group's numbers become labels: what is posted, judged and raised names ranks by
    their labels.
    """

    def __init__(self, channel: StatusChannel, status: Status, deadline: float) -> None:
        self._own_labels = channel.labels
        self._channel = channel.enclosing or channel
        self._me = self._channel.labels[self._channel.rank]
        self._status = self._described(status)
        self._deadline = deadline
        self._since = time.monotonic()
        self._seen: dict[int, PeerState] = {}
        self._unchanged_since = self._since
        self._noticed = False
        self._doubted = False

    def __enter__(self) -> Watch:
        self._channel.post(self, self._status)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # After an error the status stays readable: peers need it to come to the same finding.
        if error is None:
            self._channel.post(self, None)
        else:
            self._channel.forget(self)

    def update(self, status: Status) -> None:
        """Post what is still missing after a part of it has come."""
        status = self._described(status)
        if status != self._status:
            self._status = status
            self._channel.post(self, status)

    def reassure(self) -> None:
        """Forget a finding that was not raised: something has arrived since."""
        self._doubted = False

    def look(self) -> bool:
        """Raise if the wait cannot end well or has lasted too long. Return False if the caller has to check
        at once, without a pause, whether what it waits for has come after all."""
        now = time.monotonic()
        peers = self._peers()  # raises if another thread has interrupted this rank
        # A circle of waits is a finding about all ranks, whose statuses are read one after the other: it
        # counts only if no status has changed for a while, or ranks that are just moving on look stuck.
        if peers != self._seen:
            self._seen, self._unchanged_since = peers, now
        error = judge(self._me, peers, stable=now - self._unchanged_since >= STABLE_SECONDS)
        if error is not None and not self._too_early(error, peers, now):
            # The caller checked before these statuses were read. A peer may have done its part and left in
            # between, which looks like a loss: the caller checks once more, and only a second finding in a
            # row, with nothing arrived since (`reassure`), is raised.
            # At the deadline there is no time for a second look, and the finding says more than a timeout.
            if self._doubted or now >= self._deadline:
                try:
                    raise error
                finally:
                    del error  # or it and this frame, with all that it knows, would hold each other
            self._doubted = True
            return False
        # Verdicts come before the deadline: where a peer is lost as well, its loss is the cause to report.
        self._doubted = False
        if now >= self._deadline:
            # Unlike a finding, a timeout is this rank's alone: its status must not stay posted, because the
            # peers would take it for one that waits for them.
            self._channel.post(self, None)
            raise timed_out(self._me, peers, self._status, now - self._since)
        if not self._noticed and now - self._since >= NOTICE_SECONDS:
            self._noticed = True
            # Of the ranks that are waited for, those without a status are the late ones: the others have
            # posted that they wait themselves.
            absent = [rank for rank in self._status.waits_for if peers[rank].status is None]
            whom = ranks(absent or self._status.waits_for, all_named=True)
            _log.warning("rank %d waits for %s in %s", self._me, whom, self._status)
        return True

    def _described(self, status: Status) -> Status:
        text = status.text
        short = text if len(text) <= _LONG_TEXT else text[: _SHORT_TEXT - 3] + "..."
        return replace(status.relabelled(self._own_labels), text=short)

    def _peers(self) -> dict[int, PeerState]:
        labels = self._channel.labels
        peers = {labels[rank]: peer for rank, peer in self._channel.peers().items()}
        # What peers read of this rank may be another thread's wait. The judgement is about this one.
        peers[self._me] = replace(peers[self._me], status=self._status)
        return peers

    def _too_early(self, error: PacelineError, peers: dict[int, PeerState], now: float) -> bool:
        """Return whether ranks have not posted their calls yet: a listing of calls would blame them."""
        coming = (RankState.ABSENT, RankState.RUNNING)
        silent = any(peer.state in coming and peer.status is None for peer in peers.values())
        return isinstance(error, DisagreementError) and silent and now - self._since < SILENT_SECONDS

    def disagree(self, headline: str, patience: float = SILENT_SECONDS) -> None:
        """Raise a DisagreementError once the peers have posted their calls, or after `patience` seconds."""
        end = time.monotonic() + patience
        peers = self._peers()
        while time.monotonic() < end and any(
            peer.status is None and peer.state is RankState.RUNNING for peer in peers.values()
        ):
            time.sleep(LOOK_SECONDS)
            peers = self._peers()
        raise judge(self._me, peers, stable=False) or disagreement(self._me, peers, headline)
