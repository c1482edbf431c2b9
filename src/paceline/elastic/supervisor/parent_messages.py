"""A supervised job and its outcome as plain data, and the messages between parent and supervisor.

    parent -> supervisor    job [spec, payload, fork server's socket and watch, liveness lock], kept [..],
                            begin, stop, scale, kill
    supervisor -> parent    up, error [exception], keep [descriptors of a worker], drop, agents,
                            ended [outcome, result, report, exception]

Messages are JSON and can carry descriptors; the pair of sockets has no name, and no other process holds it.
The parent keeps a copy of each worker's socket, so that a supervisor that takes over finds the workers.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from paceline.control.worker_options import WorkerOptions
from paceline.core import fd_messages
from paceline.core.fd_messages import Plain
from paceline.core.listen_address import ANY_PORT, ListenAddress
from paceline.elastic.machine.settings import MachineSettings
from paceline.engines.local import memfd_pickle
from paceline.engines.local.engine_messages import LaunchOrder

KeptWorkers: TypeAlias = dict[int, tuple[int, tuple[int, ...]]]
"""Pid and descriptors of workers that the parent kept, by member."""


@dataclass(frozen=True)
class SupervisedJob:
    """Job that a supervisor keeps alive.

    entry     "module:function", called in each worker with a `RankTask`
    preload   modules that the fork server imports once
    folder    the run's: journal, control.json, control.secret
    options   for each worker; the supervisor adds those of one worker, such as member and slot
    bind      where the control port listens; anything but loopback lets other hosts join
    port      0: any that is free
    secret    the job's, where it was made elsewhere; None: a new one
    listening the range of every listening socket's port, and an interface other than that of `bind`
    """

    entry: str
    preload: tuple[str, ...]
    settings: MachineSettings
    folder: Path
    threads: int | None = None
    options: WorkerOptions = field(default_factory=WorkerOptions)
    bind: str = "127.0.0.1"
    port: int = 0
    listening: ListenAddress = ANY_PORT
    secret: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of a job. Descriptors belong to the receiver.

    stopped   why it was asked to stop, if it was
    result    file of what the first member returned
    failure   files of the report and, where it can travel, the exception of the worker that failed
    text      what was shown on the terminal when it failed
    """

    ok: bool
    reason: str
    stopped: str | None = None
    result: int | None = None
    failure: tuple[int, ...] | None = None
    rank: int | None = None
    pid: int | None = None
    text: str = ""

    @property
    def descriptors(self) -> tuple[int, ...]:
        result = () if self.result is None else (self.result,)
        return *result, *(self.failure or ())


@dataclass(frozen=True)
class JobSpec:
    """A job as the supervisor process gets it, with the order for its workers. `attempt` counts the
    supervisors of the job from 1."""

    job: SupervisedJob
    order: LaunchOrder
    attempt: int
    server_pid: int


def send(sock: socket.socket, kind: str, descriptors: Sequence[int] = (), **fields: Plain) -> None:
    """Send one message; descriptors are duplicated, the sender keeps its own."""
    fd_messages.send(sock, [kind, fields], descriptors)


def receive(sock: socket.socket) -> tuple[str, dict[str, Any], tuple[int, ...]] | None:
    """Return kind, fields and descriptors of the next message; None when the other end is gone."""
    received = fd_messages.receive(sock)
    if received is None:
        return None
    (kind, fields), descriptors = received
    return kind, fields, descriptors


def pack_outcome(outcome: JobOutcome) -> tuple[int, ...]:
    """Return descriptors to send: a file with the outcome, and the descriptors that it names."""
    return memfd_pickle.dump(outcome), *outcome.descriptors


def unpack_outcome(descriptors: Sequence[int]) -> JobOutcome:
    """Return the outcome with its descriptors, which have other numbers here than at the sender."""
    described, *files = descriptors
    outcome: JobOutcome = load(described)
    here = dict(zip(outcome.descriptors, files, strict=True))
    return dataclasses.replace(
        outcome,
        result=None if outcome.result is None else here[outcome.result],
        failure=None if outcome.failure is None else tuple(here[number] for number in outcome.failure),
    )


def load(descriptor: int) -> Any:
    """Read what `memfd_pickle.dump` wrote, and close the file."""
    try:
        return memfd_pickle.load(descriptor)
    finally:
        os.close(descriptor)
