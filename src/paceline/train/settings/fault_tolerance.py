"""Supervision of a run: what is done about workers that fail, and what it may cost.

A value like the others of `train_config`, each field checked by itself when it is made. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from paceline.core.chaos_spec import Chaos
from paceline.core.listen_address import port_range
from paceline.train.settings.keyword_hints import OF_PARTS, explained
from paceline.train.settings.value_checks import at_least, conform, not_empty, path_as_text, positive, refuse

_TLS = ("certificate", "key", "authority")


@explained(hints=OF_PARTS)
@final
@dataclass(frozen=True, kw_only=True)
class FaultTolerance:
    """Settings of supervision: which failures a run survives. None of them changes a result.

    enabled               a supervisor replaces workers that fail; else the first failure ends the run
    min_workers           with fewer than these the run stops with a verdict
    max_workers           how far the run is to grow (`paceline scale`, `paceline queue`): `shards` and
                          `threads` that are left open are chosen for so many workers; None: for `workers`
    max_worker_failures   replacements of one rank, before training continues without it
    max_preemptions       replacements, of all ranks together, of workers that were asked to leave
    backoff               seconds before the second replacement of a rank in a row, doubled with every further
                          one; the first starts at once
    stragglers            what happens to a slow worker: nothing, fewer shards, another process in its place,
                          or its shards are computed by idle ones too
    heartbeat             seconds between two heartbeats of a worker
    patience              seconds that workers train on without a supervisor before they save and exit
    node_wait             seconds that a run on an engine waits for nodes with fewer than `min_workers`
    joining_workers       of `workers`, those that other machines bring with `paceline join`: the run awaits
                          them as long as for its own
    token_file            a file with the run's secret, which agents elsewhere have too; None: a new secret
    bind, port            where the supervisor listens; port 0 is any free one
    ports                 "42000-42100": every listening socket of the run has a port of this range, also on
                          machines that join
    interface             name or address of the interface at which supervisor and workers listen; None: that
                          of `bind`, and on a machine that joins that of its control connection
    certificate, key, authority   files for TLS on the control connection, all three or none
    checksums             gradients are checked where they arrive: always, never, or (None) where they travel
                          between machines, not in memory that workers share. States that are handed over
                          always are
    chaos                 faults to inject: see `paceline.Chaos`; needs `enabled`
    """

    enabled: bool = True
    min_workers: int = 1
    max_workers: int | None = None
    max_worker_failures: int = 3
    max_preemptions: int = 100
    backoff: float = 0.5
    stragglers: Literal["wait", "rebalance", "replace", "backup"] = "rebalance"
    heartbeat: float = 0.25
    patience: float = 60.0
    node_wait: float = 600.0
    joining_workers: int = 0
    token_file: str | None = None
    bind: str = "127.0.0.1"
    port: int = 0
    ports: str | None = None
    interface: str | None = None
    certificate: str | None = None
    key: str | None = None
    authority: str | None = None
    checksums: bool | None = None
    chaos: str | None = None

    def __post_init__(self) -> None:
        for name in (*_TLS, "token_file"):
            path_as_text(self, name)
        chaos: object = self.chaos
        if isinstance(chaos, Chaos):
            # Kept as text, so that a file reads back to an equal object.
            object.__setattr__(self, "chaos", str(chaos) or None)
        conform(self)
        at_least(self, "min_workers", 1, "a run needs a worker")
        if self.max_workers is not None and self.max_workers < self.min_workers:
            refuse(
                self,
                "max_workers",
                f"max_workers={self.max_workers} with min_workers={self.min_workers}: no number of workers "
                "is allowed",
                f"set max_workers to {self.min_workers} or more, or leave it out",
            )
        at_least(self, "max_worker_failures", 0, "it counts the replacements of one rank")
        at_least(self, "max_preemptions", 0, "it counts the replacements of workers that left")
        at_least(self, "joining_workers", 0, "it counts workers of other machines")
        at_least(self, "port", 0, "it is a port, and 0 is any free one")
        positive(self, "backoff", "it is how many seconds a replacement waits")
        positive(self, "heartbeat", "it is the seconds between two heartbeats of a worker")
        positive(self, "patience", "it is how many seconds workers train on without a supervisor")
        positive(self, "node_wait", "it is how many seconds a run waits for nodes")
        if self.port > 65535:
            remedy = "choose a port, or 0 for any free one"
            refuse(self, "port", f"port={self.port} is more than 65535", remedy)
        if self.patience < 2 * self.heartbeat:
            refuse(
                self,
                "patience",
                f"patience={self.patience:g} with heartbeat={self.heartbeat:g}: a healthy supervisor "
                "would be given up between two heartbeats",
                f"set patience to {2 * self.heartbeat:g} or more",
            )
        if self.ports is not None:
            port_range(self.ports)
        for name in ("bind", "ports", "interface", "token_file", *_TLS):
            not_empty(self, name)
        missing = [name for name in _TLS if getattr(self, name) is None]
        if missing and len(missing) < len(_TLS):
            refuse(
                self,
                missing[0],
                f"TLS without {' and '.join(missing)}: each side shows a certificate and checks the other's",
                f"give {', '.join(_TLS)}, or none of them",
            )
        if self.chaos is not None:
            object.__setattr__(self, "chaos", str(Chaos(self.chaos)) or None)
        if self.chaos is not None and not self.enabled:
            refuse(
                self,
                "chaos",
                f"chaos={self.chaos!r} with enabled=False: faults are injected only into supervised workers",
                "set enabled=True, or leave chaos out",
            )
