"""What parent, fork server and ranks say to each other: small JSON messages that can carry descriptors.

    parent -> server   control socket   START [order, payload, job socket, stdout, stderr, *the caller's own]
    parent -> server   job socket       KILL, STACKS
    server -> parent   job socket       STARTED rank pid, EXITED rank status, REFUSED [error], DONE
    rank   -> parent   job socket       READY [stack file], RETURNED [result], FAILED [report, exception]

All sockets are pairs made by the parent and inherited or handed over, never bound to a name. They keep
message boundaries and order, so ranks and server share one job socket. Anything long travels in a memory
file. Must not know what is in those files, nor who forks what.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from paceline.core.errors import ResourceError
from paceline.core.system_calls import memory_file

Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"

START: Final = "start"
KILL: Final = "kill"
STACKS: Final = "stacks"
STARTED: Final = "started"
EXITED: Final = "exited"
REFUSED: Final = "refused"
DONE: Final = "done"
READY: Final = "ready"
RETURNED: Final = "returned"
FAILED: Final = "failed"

MAX_DESCRIPTORS: Final = 253  # the kernel's limit for one message
_MAX_BYTES: Final = 16 * 1024


@dataclass(frozen=True)
class Message:
    """One message; `descriptors` belong to the receiver."""

    kind: str
    rank: int = -1
    pid: int = 0
    status: int = 0
    when: float = 0.0
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True)
class Order:
    """Everything the server and its children must know to start one group of ranks, as plain data.

    first_rank, world_size   what the ranks' environment says, where the group is part of something larger
    outlives_parent          the group is not killed when nobody listens any more: its ranks end by themselves
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


def send(sock: socket.socket, message: Message) -> None:
    """Send one message whole; its descriptors are duplicated, the sender keeps its own."""
    body = {
        name: value
        for name, value in asdict(message).items()
        if name != "descriptors" and value != Message.__dataclass_fields__[name].default
    }
    socket.send_fds(sock, [json.dumps(body).encode()], message.descriptors)


def receive(sock: socket.socket) -> Message | None:
    """Receive one message; None when the other side has closed."""
    data, descriptors, flags, _ = socket.recv_fds(sock, _MAX_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ResourceError(
            "a message of the fork server lost its descriptors: this process has too many files open",
            remedy="close files that are no longer used, or raise the limit with `ulimit -n`",
        )
    if not data:
        return None
    return Message(**json.loads(data), descriptors=tuple(descriptors))


def write_order(order: Order) -> int:
    """Put an order into a memory file and return its descriptor."""
    descriptor = memory_file("paceline-order")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(json.dumps(asdict(order)).encode())
    return descriptor


def read_order(descriptor: int) -> Order:
    """Read an order back; the descriptor stays open."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return order_from_plain(json.loads(file.read()))


def order_from_plain(fields: dict[str, Any]) -> Order:
    """An order from what JSON made of it."""
    for name in ("preload", "sys_path", "argv", "affinity"):
        fields[name] = tuple(fields[name])
    return Order(**fields)


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors received in a message."""
    for descriptor in descriptors:
        os.close(descriptor)
