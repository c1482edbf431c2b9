"""A supervised job as plain data, and how it ended: what caller and supervisor process tell each other.

    caller -> supervisor    job [spec, payload, fork server's socket and watch, place in the crew], kept [..],
                            begin, stop, scale, kill
    supervisor -> caller    up, error, keep [descriptors of a worker], drop, ended [result, report, exception]

They speak JSON messages that can carry descriptors, over a pair of sockets that only they hold. The caller
keeps a copy of each worker's socket, so that a supervisor that takes over finds the workers as they were.
Must not know what a job computes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.core import errors, typed
from paceline.core.errors import InternalError, PacelineError, ResourceError
from paceline.core.listening import ANY_PORT, Listening
from paceline.core.system_calls import memory_file
from paceline.core.tls import Tls
from paceline.elastic.model import Settings
from paceline.engines.local import protocol
from paceline.engines.local.protocol import Order, Plain

_MAX_BYTES: Final = 60 * 1024
_MAX_DESCRIPTORS: Final = 16


@dataclass(frozen=True)
class Job:
    """What a supervisor is to keep alive.

    entry     "module:function", called in each worker with a `child.Task`
    payload   descriptor of what `engines.local.call.pack` made; it stays the caller's
    preload   modules that the fork server imports once
    folder    the run's: journal, control.json, control.secret
    options   handed to each worker, with its slot, member, address and secret; "exact": a worker with
              another fingerprint or model is refused; "patience": seconds that workers go on without a
              supervisor (60); "listen": where they listen for each other
    bind      where the control port listens; anything but loopback lets other machines join
    port      0: any that is free
    listening the range of every listening socket's port, and an interface other than that of `bind`
    """

    entry: str
    payload: int
    preload: tuple[str, ...]
    settings: Settings
    folder: Path
    threads: int | None = None
    options: Mapping[str, Plain] = field(default_factory=dict)
    bind: str = "127.0.0.1"
    port: int = 0
    tls: Tls | None = None
    listening: Listening = ANY_PORT


@dataclass(frozen=True)
class Outcome:
    """How a job ended. Descriptors belong to the receiver.

    stopped   why it was asked to stop, if it was
    result    file of what the first member returned
    failure   files of the report and, where it can travel, the exception of the worker that is to blame
    text      what was told on the terminal when it failed
    """

    ok: bool
    reason: str
    stopped: str | None = None
    result: int | None = None
    failure: tuple[int, ...] | None = None
    rank: int | None = None
    pid: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Spec:
    """A job as the supervisor process gets it: a Job without descriptors, and an order for its workers."""

    settings: Settings
    folder: str
    options: dict[str, Any]
    bind: str
    port: int
    listening: Listening
    tls: dict[str, str] | None
    order: dict[str, Any]
    attempt: int
    server_pid: int

    @property
    def make_order(self) -> Order:
        return protocol.order_from_plain(dict(self.order))

    @property
    def make_tls(self) -> Tls | None:
        return None if self.tls is None else Tls(**{name: Path(value) for name, value in self.tls.items()})


def spec_of(job: Job, order: Order, attempt: int, server_pid: int) -> Spec:
    """What is sent for a job."""
    tls = None if job.tls is None else {name: str(path) for name, path in vars(job.tls).items()}
    return Spec(
        settings=job.settings,
        folder=str(job.folder),
        options=dict(job.options),
        bind=job.bind,
        port=job.port,
        listening=job.listening,
        tls=tls,
        order=asdict(order),
        attempt=attempt,
        server_pid=server_pid,
    )


def write_spec(spec: Spec) -> int:
    """A memory file with the spec."""
    descriptor = memory_file("paceline-job")
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(json.dumps(asdict(spec)).encode())
    return descriptor


def read_spec(descriptor: int) -> Spec:
    """The spec in a memory file, which is closed."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        spec = typed.convert(json.load(file), Spec, "job")
    assert isinstance(spec, Spec)
    return spec


def send(sock: socket.socket, kind: str, descriptors: Sequence[int] = (), **fields: Plain) -> None:
    """Send one message; descriptors are duplicated, the sender keeps its own."""
    socket.send_fds(sock, [json.dumps([kind, fields]).encode()], list(descriptors))


def receive(sock: socket.socket) -> tuple[str, dict[str, Any], tuple[int, ...]] | None:
    """Kind, fields and descriptors of the next message; None when the other side is gone."""
    try:
        data, descriptors, flags, _ = socket.recv_fds(
            sock, _MAX_BYTES, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        protocol.close_all(descriptors)
        raise ResourceError(
            "a message of the supervisor lost its descriptors: this process has too many files open",
            remedy="close files that are no longer used, or raise the limit with `ulimit -n`",
        )
    if not data:
        return None
    kind, fields = json.loads(data)
    return kind, fields, tuple(descriptors)


def error_fields(error: PacelineError) -> dict[str, Plain]:
    """An error as plain data."""
    return {"name": type(error).__name__, "message": error.message[:20_000], "remedy": error.remedy}


def error_from(fields: Mapping[str, Any]) -> PacelineError:
    """The error again; one of a class that is not in core.errors comes as InternalError."""
    cls = getattr(errors, str(fields.get("name")), InternalError)
    if not (isinstance(cls, type) and issubclass(cls, PacelineError)):
        cls = InternalError
    return cls(str(fields.get("message")), remedy=str(fields.get("remedy", "")))


def with_descriptors(outcome: Outcome, descriptors: Sequence[int]) -> Outcome:
    """An outcome whose descriptor fields are places in `descriptors` with the descriptors themselves."""

    def place(index: int) -> int:
        return descriptors[index]

    return dataclasses.replace(
        outcome,
        result=None if outcome.result is None else place(outcome.result),
        failure=None if outcome.failure is None else tuple(map(place, outcome.failure)),
    )
