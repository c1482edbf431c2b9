"""Waiting for something that moves in steps, without losing sight of the other ranks.

`drive` lets a piece of work advance until it is done; when nothing moves for a moment it looks around, and
raises if the wait cannot end well. Knows the mesh, not what the work is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from paceline.comm.calls import Peer, RankState, Status
from paceline.comm.transport.bulk import Transfer
from paceline.comm.transport.mesh import Mesh
from paceline.comm.transport.watch import LOOK_SECONDS, Watch
from paceline.core.errors import InternalError, PeerLostError


class Work(Protocol):
    """Moves in steps: `advance` gives (all done, something moved), `status` what is still missing."""

    def advance(self) -> tuple[bool, bool]: ...
    def status(self) -> Status: ...
    def underway_with(self) -> set[int]: ...


def drive(
    work: Work, mesh: Mesh, version: Callable[[], int], pause: Callable[[int], None], deadline: float
) -> None:
    """Lets `work` advance until it is done; `pause(seen)` sleeps while `version()` is `seen`, or a moment."""
    outlook = _During(mesh, work)
    watch: Watch | None = None
    moved_at = time.monotonic()
    departures, calm = mesh.departures, True
    try:
        while True:
            seen = version()
            mesh.check_open()
            done, moved = work.advance()
            if done:
                break
            now = time.monotonic()
            if moved:
                moved_at, calm = now, True
                if watch is not None:
                    watch.reassure()
                continue
            if now - moved_at >= LOOK_SECONDS or not calm or departures != mesh.departures:
                departures = mesh.departures
                if watch is None:
                    watch = Watch(outlook, work.status(), deadline)
                    watch.__enter__()
                else:
                    watch.update(work.status())
                calm = watch.look()
                moved_at = now
            if calm:
                pause(seen)
    except BaseException as error:
        if watch is not None:
            watch.__exit__(type(error), error, None)
        raise
    if watch is not None:
        watch.__exit__(None, None, None)


class _During:
    """The mesh for a watch: a rank that left after doing its part is not missing while its bytes arrive."""

    def __init__(self, mesh: Mesh, work: Work) -> None:
        self.rank = mesh.rank
        self._mesh = mesh
        self._work = work

    def post(self, status: Status | None) -> None:
        self._mesh.post(status)

    def peers(self) -> dict[int, Peer]:
        found = self._mesh.peers()
        for peer in self._work.underway_with():
            if peer in found and found[peer].state is RankState.LEFT:
                found[peer] = replace(found[peer], state=RankState.RUNNING)
        return found


def raise_lost(mesh: Mesh, transfer: Transfer, status: Status, patience: float = 0.5) -> None:
    """A transfer broke: says who is gone as soon as the mesh knows, else with whom it broke."""
    with Watch(mesh, replace(status, ends_alone=True), time.monotonic() + 2 * patience) as watch:
        end = time.monotonic() + patience
        while time.monotonic() < end:
            seen = mesh.version
            if watch.look():
                mesh.wait(seen, LOOK_SECONDS)
    if transfer.peer < 0:
        raise InternalError(
            f"the backend's own all-reduce failed in {status}: {transfer.error}"
        ) from transfer.error
    raise PeerLostError(
        f"the connection to rank {transfer.peer} broke in {status}: {transfer.error}", rank=transfer.peer
    ) from transfer.error
