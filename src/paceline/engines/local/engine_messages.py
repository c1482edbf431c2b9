"""Messages between parent, fork server and ranks.

    parent -> server   control socket   START [order, payload, stdout, stderr, *job sockets, *own files]
    parent -> server   job socket       KILL
    server -> parent   job socket       STARTED pid, EXITED status, REFUSED [error], DONE
    rank   -> parent   job socket       READY [stack file], RETURNED [result], FAILED [report, exception]

Each rank has a job socket, which the server shares with it. Anything long travels in a memory file, whose
descriptor the message carries (`core.fd_messages`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from paceline.core import fd_messages
from paceline.core.fd_messages import Plain

START: Final = "start"
KILL: Final = "kill"
STARTED: Final = "started"
EXITED: Final = "exited"
REFUSED: Final = "refused"
DONE: Final = "done"
READY: Final = "ready"
RETURNED: Final = "returned"
FAILED: Final = "failed"


@dataclass(frozen=True)
class EngineMessage:
    """One message; `descriptors` belong to the receiver."""

    kind: str
    pid: int = 0
    status: int = 0
    when: float = 0.0
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True)
class LaunchOrder:
    """Order to start one group of ranks, for the server and its children, as plain data.

    first_rank, world_size   for the ranks' environment, where the group is part of a larger job
    outlives_parent          the group is not killed when its parent is gone: its ranks end by themselves
    outlives_server          nor when the fork server dies: each rank is watched by its parent, and ends by
                             itself when that is gone too
    """

    entry: str
    workers: int
    preload: tuple[str, ...]
    threads: int | None
    options: Mapping[str, Plain]
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    cwd: str | None
    environ: Mapping[str, str]
    affinity: tuple[int, ...]
    first_rank: int = 0
    world_size: int = 0
    outlives_parent: bool = False
    outlives_server: bool = False

    @property
    def ranks_in_all(self) -> int:
        return self.world_size or self.workers


def send(sock: socket.socket, message: EngineMessage) -> None:
    """Send one message whole; its descriptors are duplicated, the sender keeps its own."""
    body = {
        name: value
        for name, value in asdict(message).items()
        if name != "descriptors" and value != EngineMessage.__dataclass_fields__[name].default
    }
    fd_messages.send(sock, body, message.descriptors)


def receive(sock: socket.socket) -> EngineMessage | None:
    """Receive one message; None when the other side has closed."""
    received = fd_messages.receive(sock)
    return None if received is None else EngineMessage(**received[0], descriptors=received[1])


def write_order(order: LaunchOrder) -> int:
    """Put an order into a memory file and return its descriptor."""
    return fd_messages.to_memory_file("paceline-order", asdict(order))


def read_order(descriptor: int) -> LaunchOrder:
    """Read an order back; the descriptor stays open."""
    fields = fd_messages.from_memory_file(descriptor)
    tuples = {name: tuple(fields[name]) for name in ("preload", "sys_path", "argv", "affinity")}
    return LaunchOrder(**fields | tuples)
