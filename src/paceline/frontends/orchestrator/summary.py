"""What a training came to, as plain dicts for programs and people.

Must not know where the numbers come from.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.frontends.orchestrator.config import TrainingConfig
from paceline.frontends.orchestrator.job import Outcome
from paceline.frontends.orchestrator.tracker import Tracker


def result_of(config: TrainingConfig, tracker: Tracker, outcome: Outcome, folder: Path) -> dict[str, Any]:
    """What `train_distributed` returns."""
    history = outcome.history
    found: dict[str, Any] = {
        "epochs_completed": outcome.epochs_completed,
        "final_loss": history.final_loss,
        "losses": [record.loss for record in history.epochs],
        "steps": len(history.steps),
        "samples": sum(record.samples for record in history.steps),
        "seconds": history.total_time,
        "samples_per_second": history.samples_per_second,
        "workers": history.workers,
        "strategy": config.strategy_name,
        "exact": _is_exact(config),
        "worker_failures": len(tracker.failures),
        "model_version": tracker.checkpoints[-1].version if tracker.checkpoints else None,
        "state_hash": history.state_hash,
        "stopped": outcome.stopped,
        "run_dir": str(folder),
    }
    if config.asynchronous:
        found["staleness"] = outcome.staleness
    return found


def summary_of(
    config: TrainingConfig,
    tracker: Tracker,
    outcome: Outcome | None,
    seconds: float,
    running: bool,
    folder: Path | None,
) -> dict[str, Any]:
    """What `get_training_summary` returns, during a training and after it."""
    history = None if outcome is None else outcome.history
    rate = tracker.samples / seconds if seconds > 0.0 else math.nan
    found: dict[str, Any] = {
        "running": running,
        "strategy": config.strategy_name,
        "exact": _is_exact(config),
        "epochs": config.epochs,
        "epochs_completed": None if outcome is None else outcome.epochs_completed,
        "steps": tracker.steps,
        "samples": tracker.samples,
        "last_loss": tracker.last_loss,
        "final_loss": None if history is None else history.final_loss,
        "total_time": seconds,
        "samples_per_second": rate if history is None else history.samples_per_second,
        "workers": [{**asdict(node), "state": node.state.value} for node in tracker.nodes()],
        "shards": [
            {**asdict(shard), "range": [shard.range.start, shard.range.stop]} for shard in tracker.shards
        ],
        "worker_failures": [
            {"worker": failed.rank, "pid": failed.pid, "phase": failed.phase, "reason": failed.reason}
            for failed in tracker.failures
        ],
        "repairs": [
            {"generation": one.generation, "seconds": one.seconds, "lost": list(one.lost)}
            for one in tracker.repairs
        ],
        "verdicts": [verdict.text for verdict in tracker.verdicts],
        "model_versions": [asdict(version) for version in tracker.checkpoints],
        "stopped": None if outcome is None else outcome.stopped,
        "state_hash": None if history is None else history.state_hash,
        "run_dir": None if folder is None else str(folder),
    }
    if config.asynchronous:
        found["staleness"] = {} if outcome is None else outcome.staleness
    return found


def _is_exact(config: TrainingConfig) -> bool:
    return config.exact and not config.asynchronous and config.own_aggregation is None
