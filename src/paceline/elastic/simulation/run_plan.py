"""Length, speed and duties of a simulated run: plain numbers, drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import final

from paceline.elastic.machine.settings import MachineSettings, StragglerPolicy


@final
@dataclass(frozen=True)
class RunPlan:
    """Steps, duties and times of a run; seconds are virtual.

    private_state   each shard has state that only the member that computes it holds: if it is lost, all
                    members go back to a checkpoint
    """

    settings: MachineSettings
    steps: int
    shard_seconds: float
    boot_seconds: float
    save_every: int
    evaluate_every: int
    epoch_steps: int
    audit_every: int
    private_state: bool
    nodes: int = 0  # agents of an engine, which have all the workers
    duty_seconds: float = 0.05
    commit_seconds: float = 0.004

    def duties(self, steps: int) -> tuple[str, ...]:
        """Return the duties after this number of committed steps."""
        due = []
        if steps and steps % self.evaluate_every == 0:
            due.append("evaluation")
        if steps and (steps % self.save_every == 0 or steps == self.steps):
            due.append("checkpoint")
        return tuple(due)


def drawn(rng: Random, seed: int, workers: int) -> RunPlan:
    """Draw a run of this number of workers. Limits are short, so that much happens in little virtual time."""
    shards = workers * rng.choice((1, 1, 2, 3))
    policies: tuple[StragglerPolicy, ...] = ("rebalance", "rebalance", "wait", "replace", "backup")
    settings = MachineSettings(
        workers=workers,
        shards=shards,
        min_workers=rng.choice((1, 1, 1, max(1, workers // 2))),
        max_worker_failures=rng.choice((2, 4, 8)),
        max_preemptions=rng.choice((2, 100)),
        backoff=0.2,
        backoff_most=2.0,
        forgive_seconds=5.0,
        seed=seed,
        heartbeat=0.3 if workers <= 64 else 1.0,
        silence_least=2.0 if workers <= 64 else 4.0,
        hang_least=5.0 if workers <= 64 else 8.0,
        hang_steps=10.0,
        slow_phase_seconds=8.0,
        start_seconds=8.0,
        stop_seconds=60.0,
        install_seconds=4.0,
        stragglers=rng.choice(policies),
        rebalance_seconds=1.0,
    )
    return RunPlan(
        settings=settings,
        steps=rng.randrange(16, 36),
        shard_seconds=rng.choice((0.05, 0.1, 0.2)) * workers / shards,
        boot_seconds=rng.choice((0.1, 0.3, 1.0)),
        save_every=rng.choice((4, 7)),
        evaluate_every=rng.choice((5, 9)),
        epoch_steps=6,
        audit_every=rng.choice((1, 3)),
        private_state=rng.random() < 0.1,
    )


def on_engine(plan: RunPlan, nodes: int) -> RunPlan:
    """Return the same run with all its workers on the nodes of an engine."""
    settings = replace(
        plan.settings, agent_workers=plan.settings.workers, agents_wait_seconds=20.0, max_preemptions=100
    )
    return replace(plan, settings=settings, nodes=nodes)
