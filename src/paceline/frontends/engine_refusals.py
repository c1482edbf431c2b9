"""Where an engine cannot have the workers: something else has them, each of several ranks would start a run
on it, or this machine would have to stand for its nodes. Imports no torch.
"""

from __future__ import annotations

import os

from paceline.comm import default_group
from paceline.comm.rendezvous.environment import find_launch_info
from paceline.core.engine_registry import EngineSettings
from paceline.core.errors import ConfigError, UsageError
from paceline.engines.slurm.allocation import StepTask
from paceline.frontends import mpi_calls, overrides
from paceline.train.settings.train_config import TrainConfig


def refuse_engine(engine: object, why: str) -> None:
    """Refuse an engine where something else has the workers; `why` goes on after the engine's name."""
    if isinstance(engine, EngineSettings):
        raise ConfigError(
            f"engine={engine.name} {why}",
            remedy="use paceline.Trainer, or leave the engine out",
            key="engine",
        )


def refuse_engine_on_ranks(engine: EngineSettings) -> None:
    """Refuse an engine in a rank of a job: every rank would start a run of its own."""
    context = default_group.current()
    ranks = _launched_ranks() if context is None else context.world_size
    if ranks > 1:
        raise UsageError(
            f"engine={engine.name} inside a job of {ranks} ranks, each of which would start a run on it",
            remedy="start the script once, or leave the engine out, and the ranks train",
        )


def _launched_ranks() -> int:
    """Return how many ranks a launcher has started, this process among them. A batch script of SLURM looks
    like a rank and is alone, and so is the first of several tasks of `srun paceline train`: the others wait.
    """
    try:
        launcher = find_launch_info(os.environ)
    except UsageError:
        return 1  # salloc sets the number of tasks alone, and MASTER_ADDR may be there for another job
    if launcher.source == "SLURM" and (
        StepTask.from_environment() is None or overrides.current().command is not None
    ):
        return 1
    return launcher.world_size


def check_search(config: TrainConfig) -> None:
    """Refuse to search on this machine for the micro-batch of other machines."""
    ranks = mpi_calls.current()
    here = ranks is not None and ranks.place.on_one_host
    if config.micro_batch == "auto" and isinstance(config.engine, EngineSettings) and not here:
        raise ConfigError(
            f'micro_batch="auto" on {config.engine.name}: the search would fill the memory of this machine, '
            "and not that of the nodes",
            remedy="give micro_batch a number",
            key="micro_batch",
        )
