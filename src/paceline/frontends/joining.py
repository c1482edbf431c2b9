"""Whether this process is part of a job already, and what a run's settings become there.

Shared by `Trainer` and `session`. Must not import torch: a script that only starts workers never needs it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.train.config import TrainConfig
from paceline.train.run_folder import RunFolder

if TYPE_CHECKING:
    from paceline.comm.context import DistributedContext

_log = logging.getLogger(__name__)


def running_job() -> DistributedContext | None:
    """The group that this process belongs to, if it does: a launcher's is joined here."""
    from paceline.comm import default_group
    from paceline.comm.environment import find_place

    context = default_group.current()
    if context is None and find_place(os.environ).world_size > 1:
        from paceline.frontends.process_group import init_process_group

        init_process_group()
        context = default_group.current()
    return context


def cores() -> int:
    return len(os.sched_getaffinity(0))


def prepare(config: TrainConfig, context: DistributedContext | None) -> tuple[TrainConfig, RunFolder]:
    """The config with nothing left open, and the run's folder: the first rank decides, the others follow.

    What a run that goes on had recorded (shards, threads) stays as it was where the config leaves it open.
    """
    if context is not None and config.workers != context.world_size:
        if config.workers != 1 and context.is_master:
            _log.warning(
                "workers=%d, and this job has %d: it trains with those", config.workers, context.world_size
            )
        shards = config.workers if config.shards is None and config.workers != 1 else config.shards
        config = dataclasses.replace(config, workers=context.world_size, shards=shards)
    shards, threads, path = config.shards, config.threads, ""
    if context is None or context.is_master:
        folder = RunFolder.for_config(config.resolved(cores()))
        path = str(folder.path)
        if config.resume is not None:
            recorded = tomllib.loads(folder.config_file.read_text(encoding="utf-8"))
            shards = recorded.get("shards") if shards is None else shards
            threads = recorded.get("threads") if threads is None else threads
        filled = dataclasses.replace(config, shards=shards, threads=threads).resolved(cores())
        shards, threads = filled.shards, filled.threads
    if context is not None:
        shards, threads, path = context.broadcast([shards, threads, path])
    settled = dataclasses.replace(config, shards=shards, threads=threads).resolved(cores())
    return settled, RunFolder(Path(path))
