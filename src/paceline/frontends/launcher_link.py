"""A rank's connection to the launcher of `paceline run` that started it.

Messages of a rank, and what the launcher answers:

    call number                     lead [server control, server watch] folder, server, else follow
    folder number, path             nothing: where the call keeps its run
    outcome number, ok,             outcome number, ok [result], to every rank that asked for the call
            stopped [result]
    run number                      run folder: of the run with this number before all ranks started again
    run_folder number, path         nothing: where it is now
    keep_survivors needed, one_of   nothing
    losses                          losses: ranks that failed before all ranks started again

The connection belongs to the process that the launcher started: processes that the script forks have none.
Imports no torch.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, final

from paceline.core import fd_messages
from paceline.core.errors import PeerLostError


@final
@dataclass(eq=False)
class LauncherLink:
    """This process's end. `joint`: whether calls of a Trainer are made once for all ranks of the launcher.
    `calls` counts those that this rank has made; `has_server`: whether it was lent the fork server. `runs`
    counts the runs that it has prepared outside of them."""

    sock: socket.socket = field(repr=False)
    rank: int
    world_size: int
    joint: bool
    owner: int = field(default_factory=os.getpid)
    calls: int = 0
    runs: int = 0
    has_server: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def send(self, kind: str, descriptors: tuple[int, ...] = (), **fields: Any) -> None:
        """Send a message; PeerLostError where the launcher is gone."""
        try:
            fd_messages.send(self.sock, {"kind": kind, **fields}, descriptors)
        except ConnectionError as error:
            raise _gone() from error

    def receive(self) -> tuple[dict[str, Any], tuple[int, ...]]:
        """Wait for the launcher's next message."""
        message = fd_messages.receive(self.sock)
        if message is None:
            raise _gone()
        return message


def folder_before_restart() -> str:
    """Return the folder of the run that this rank is about to prepare, where an earlier process of this rank
    had begun it and all ranks were started again. Empty for none, and for a call that is made for all ranks,
    whose folder came with it."""
    link = current()
    if link is None or link.lock.locked():
        return ""
    with link.lock:
        link.runs += 1
        link.send("run", number=link.runs)
        answer, _ = link.receive()
    return str(answer["folder"])


def announce_folder(folder: str) -> None:
    """Tell the launcher where the run is that this rank has prepared: a successor of this rank goes on with
    it."""
    link = current()
    if link is None:
        return
    if link.lock.locked():
        link.send("folder", number=link.calls, path=folder)
    else:
        link.send("run_folder", number=link.runs, path=folder)


def _gone() -> PeerLostError:
    return PeerLostError(
        "the launcher of this rank is gone", remedy="look at the output of `paceline run` for the reason"
    )


_links: list[LauncherLink] = []


def open_link(descriptor: int, rank: int, world_size: int, *, joint: bool) -> None:
    """Take the connection over, in a process that a launcher has just started."""
    _links[:] = [LauncherLink(socket.socket(fileno=descriptor), rank, world_size, joint)]


def current() -> LauncherLink | None:
    """Return this process's connection to its launcher; None in any other process."""
    return _links[0] if _links and _links[0].owner == os.getpid() else None


def keep_survivors(needed: Iterable[int] = (), one_of: Iterable[int] = ()) -> bool:
    """Ask the launcher to let the other ranks live when one is lost, because they go on without it by
    themselves; it starts none again then. `needed`: ranks without which they cannot; `one_of`: ranks of which
    one has to be left. False: this process has no such launcher."""
    link = current()
    if link is not None:
        link.send("keep_survivors", needed=list(needed), one_of=list(one_of))
    return link is not None


@final
@dataclass(frozen=True)
class RankLoss:
    """A rank that failed before all ranks were started again. `when`: on time.monotonic of its host."""

    rank: int
    pid: int
    host: str
    how: str
    when: float


def losses_before_restart() -> list[RankLoss]:
    """Return the ranks that failed by themselves in the start before this one, the first one in front."""
    link = current()
    if link is None or link.lock.locked():
        return []
    with link.lock:
        link.send("losses")
        answer, _ = link.receive()
    return [RankLoss(**one) for one in answer["losses"]]
