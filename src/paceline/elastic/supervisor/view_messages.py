"""The message that installs a view: the machine's plan, with processes and addresses, and shared memory.

Where every member runs on this host, the supervisor makes their shared segment and holds it open until
they have opened it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import final

from paceline.control.messages import View, ViewPlan
from paceline.core.errors import ResourceError
from paceline.core.host import host_identity
from paceline.core.shm_segment_layout import create_segment
from paceline.elastic.supervisor.worker_record import WorkerRecord


@final
@dataclass
class ViewMessages:
    """Makes the View messages and keeps the shared segment until all have opened it. `latest` is the view
    that was sent last; `waiting`: members that have not installed it; `claims`: shards of the latest step
    that some member has computed."""

    backup: bool
    exact: bool = True
    latest: View | None = None
    waiting: set[int] = field(default_factory=set)
    claims: set[tuple[int, int]] = field(default_factory=set)
    _segment: int = -1
    _host: str = field(default_factory=host_identity)

    def make(self, plan: ViewPlan, records: Mapping[int, WorkerRecord], journaled: int) -> View:
        """Return the view to send."""
        hellos = [records[member].hello for member in plan.members]
        self.release()
        is_local = all(hello is not None and hello.host == self._host for hello in hellos)
        segment = self._share(len(hellos)) if is_local else ()
        if not self.exact:
            # Where bits may differ, each member is one slice of the batch.
            plan = replace(plan, shards=tuple((rank,) for rank in range(len(plan.members))))
        self.latest = plan.to_view(
            pids=tuple(0 if hello is None else hello.pid for hello in hellos),
            hosts=tuple("" if hello is None else hello.host for hello in hellos),
            hostnames=tuple("" if hello is None else hello.hostname for hello in hellos),
            endpoints=endpoints([records[member] for member in plan.members]),
            segment=segment,
            journaled=journaled,
            backup=self.backup,
        )
        self.waiting = set(plan.members)
        self.claims.clear()
        return self.latest

    def installed(self, member: int, generation: int) -> None:
        """Note that a member is in the view; once all are, the segment's descriptor can be closed."""
        if self.latest is not None and generation == self.latest.generation:
            self.waiting.discard(member)
            if not self.waiting:
                self.release()

    def claim(self, generation: int, step: int, shard: int) -> bool:
        """Return whether this is the first result for this shard of this step."""
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


def endpoints(records: list[WorkerRecord]) -> tuple[tuple[str, int], ...]:
    """Return where each of these members can be reached.

    A member that knows no address for itself has the one its control connection comes from. For members on
    this host that is loopback, which other hosts cannot use: they get the address by which the members
    of other hosts reach the supervisor.
    """
    ours = ""
    for record in records:
        if record.connection is not None and not _is_local(record.connection.host):
            ours = record.connection.channel.own_host()
    addresses = []
    for record in records:
        host, port = record.hello.endpoint if record.hello is not None else ("", 0)
        if not host or (ours and _is_local(host)):
            seen = record.connection.host if record.connection is not None else ""
            host = ours if ours and _is_local(seen) else seen
        addresses.append((host, port))
    return tuple(addresses)


def _is_local(host: str) -> bool:
    return host in ("", "::1", "0.0.0.0", "::", "localhost") or host.startswith("127.")
