"""Numbers that the machine decides by, all times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.core.time_limits import START_SECONDS

StragglerPolicy: TypeAlias = Literal["wait", "rebalance", "replace", "backup"]

LOCAL_AGENT = 0
"""Agent id of the supervisor's own host; agents of other hosts are 1, 2, ..."""


@dataclass(frozen=True)
class MachineSettings:
    """Limits, budgets and policies of one job."""

    workers: int
    shards: int
    agent_workers: int = 0  # of `workers`, those that come with agents of other hosts
    agents_wait_seconds: float = 600.0  # that too few workers wait for agents; counts from the last loss
    min_workers: int = 1
    most_workers: int = 0  # largest size that `scale` may request; 0: any
    max_worker_failures: int = 3  # per slot; after more the slot is given up
    max_preemptions: int = 100  # of all slots together
    backoff: float = 0.5  # before the second start in a row; the first replacement starts at once
    backoff_most: float = 30.0
    jitter: float = 0.25  # random share of a back-off
    forgive_seconds: float = 60.0  # of committed steps, after which failures in a row count from zero
    seed: int = 0
    heartbeat: float = 0.25
    silence_least: float = 2.0  # silence limit: at least this many seconds ...
    silence_steps: float = 5.0  # ... and at least this many steps
    hang_least: float = 5.0  # limit of a member without progress: at least this many seconds ...
    hang_steps: float = 20.0  # ... and at least this many steps
    slow_phase_seconds: float = 600.0  # limit of the first step, the first evaluation and the first save
    start_seconds: float = START_SECONDS  # from the request for a worker to its hello
    stop_seconds: float = 600.0  # from the request to stop to the end
    stragglers: StragglerPolicy = "rebalance"
    straggler_factor: float = 1.5  # of the median time per shard
    replace_factor: float = 3.0
    rebalance_seconds: float = 2.0  # between two changes of the assignment
    agent_seconds: float = 10.0  # that an agent's connection may be lost
    install_seconds: float = 60.0  # limit of the state transfer in a new view
    dial_seconds: float = 10.0  # after which workers are asked again to dial each other
    check_seconds: float = 9.0  # limit of the members' answers to a link probe
    cut_short_seconds: float = 2.0  # limit of a view's formation while the job stops or a member leaves
    gather_seconds: float = 0.25  # that a joiner waits for others that were started with it
    saves_on_failure: bool = True  # whether members can save their state when the job fails for good

    @property
    def local_workers(self) -> int:
        """Workers that are started on the supervisor's own host."""
        return self.workers - self.agent_workers

    @property
    def scales_by_agents(self) -> bool:
        """Whether all workers come with agents: another size of the job is another number of agents."""
        return self.agent_workers > 0 and self.local_workers == 0
