"""A view as members get it: the machine's plan, filled with who and where, and shared memory for all of them.

Where every member runs on this machine, the supervisor makes their shared segment and holds it open until
they have opened it. Must not decide who is in a view.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from paceline.comm.transport.shm.layout import create_segment
from paceline.core.control.host import host_identity
from paceline.core.control.messages import View
from paceline.core.errors import ResourceError
from paceline.elastic.model import ViewPlan
from paceline.elastic.shell.seats import Seat


@final
class Views:
    """`latest` is the view that was sent last; `waiting`: who has not installed it."""

    def __init__(self, *, backup: bool, exact: bool = True) -> None:
        self._host = host_identity()
        self._backup = backup
        self._exact = exact
        self._segment = -1
        self.latest: View | None = None
        self.waiting: set[int] = set()
        self.claims: set[tuple[int, int]] = set()

    def make(self, plan: ViewPlan, seats: Mapping[int, Seat], journaled: int) -> View:
        """The view to send; ResourceError where there is no shared memory for it."""
        hellos = [seats[member].hello for member in plan.members]
        self.release()
        segment = (
            self._share(len(hellos)) if all(h is not None and h.host == self._host for h in hellos) else ()
        )
        self.latest = View(
            generation=plan.generation,
            members=plan.members,
            slots=plan.slots,
            pids=tuple(0 if hello is None else hello.pid for hello in hellos),
            hosts=tuple("" if hello is None else hello.host for hello in hellos),
            hostnames=tuple("" if hello is None else hello.hostname for hello in hellos),
            endpoints=endpoints([seats[member] for member in plan.members]),
            # Where bits may differ, each member is one slice of the batch.
            shards=plan.shards if self._exact else tuple((rank,) for rank in range(len(plan.members))),
            source=plan.source,
            behind=plan.behind,
            restore=plan.restore,
            restore_before=plan.restore_before,
            ends=plan.ends,
            segment=segment,
            journaled=journaled,
            backup=self._backup,
            disputed=plan.disputed,
        )
        self.waiting = set(plan.members)
        self.claims.clear()
        return self.latest

    def installed(self, member: int, generation: int) -> None:
        """A member is in the view; when all are, nobody needs the segment's descriptor any more."""
        if self.latest is not None and generation == self.latest.generation:
            self.waiting.discard(member)
            if not self.waiting:
                self.release()

    def claim(self, generation: int, step: int, shard: int) -> bool:
        """Whether this is the first time that somebody has computed this shard of this step."""
        if self.latest is None or generation != self.latest.generation or (step, shard) in self.claims:
            return False
        if self.claims and step > max(done for done, _ in self.claims):
            self.claims.clear()
        self.claims.add((step, shard))
        return True

    def release(self) -> None:
        if self._segment >= 0:
            os.close(self._segment)
            self._segment = -1

    def _share(self, members: int) -> tuple[int, ...]:
        try:
            self._segment = create_segment(members)
        except ResourceError:
            # Members can still meet over sockets.
            return ()
        made = os.fstat(self._segment)
        return os.getpid(), self._segment, made.st_ino, made.st_dev


def endpoints(seats: list[Seat]) -> tuple[tuple[str, int], ...]:
    """Where members can be met. One that knows no address of its own has the one it was seen with; for those
    on this machine that is the one by which the others found us."""
    ours = ""
    for seat in seats:
        if seat.connection is not None and not _is_local(seat.connection.host):
            ours = seat.connection.channel.own_host()
    found = []
    for seat in seats:
        host, port = seat.hello.endpoint if seat.hello is not None else ("", 0)
        if not host or (ours and _is_local(host)):
            seen = seat.connection.host if seat.connection is not None else ""
            host = ours if ours and _is_local(seen) else seen
        found.append((host, port))
    return tuple(found)


def _is_local(host: str) -> bool:
    return host in ("", "::1", "0.0.0.0", "::", "localhost") or host.startswith("127.")
