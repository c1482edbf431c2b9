"""Options of a worker, given by the process that starts it: settings of the job, and which worker it is.

One class from the caller of a run to the worker: `supervised_run` makes it for the job, the supervisor or an
agent completes it for each worker, and it travels as plain data in the order to the fork server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, final

from paceline.core.plain_options import PlainOptions
from paceline.core.tls import Tls

WORKER_PRELOAD: Final = (
    "torch",
    "paceline.frontends.rank_main",
    "paceline.train.member.member_training",
    # Optimizers and deterministic kernels import torch's compiler, hundreds of modules: once for all workers.
    "torch._inductor.config",
    # The job of a worker names a function of the first, and its first connection needs the second (names of
    # hosts): milliseconds of each replacement.
    "paceline.monitor.progress_factory",
    "encodings.idna",
)
"""Modules that a fork server imports before it forks a worker."""


@final
@dataclass(frozen=True)
class WorkerOptions(PlainOptions):
    """Options of a worker: the first six are the job's, the others one worker's.

    exact      a worker with another fingerprint or model is refused
    patience   seconds that workers train without a supervisor, and the job without its caller
    chaos      faults to inject
    links      measured costs of the links, as plain data
    tls        certificates of the control connection
    returns_from_agents  the results of workers at agents travel to the caller: there are no others
    attempt    counts the workers of a slot from 1
    address    of the supervisor; secret: the job's, as hex
    folder     the run's, on the supervisor's host; empty on others
    listen     where other members reach this one; ports: the range for its listeners
    """

    exact: bool = True
    patience: float = 60.0
    chaos: str | None = None
    links: dict[str, Any] = field(default_factory=dict)
    tls: Tls | None = None
    returns_from_agents: bool = False
    member: int = 0
    slot: int = 0
    attempt: int = 1
    address: tuple[str, int] = ("", 0)
    secret: str = ""
    folder: str = ""
    listen: str = "127.0.0.1"
    ports: str = ""


@final
@dataclass(frozen=True)
class AgentLaunch(PlainOptions):
    """Options with which an agent starts workers, beside the payload: their entry, the modules that its fork
    server imports once, threads of numeric libraries, and the options that all workers of the job have."""

    entry: str
    preload: tuple[str, ...] = ()
    threads: int | None = None
    options: WorkerOptions = WorkerOptions()
