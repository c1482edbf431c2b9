"""Position of a run, as an objective, a modifier or a loop of the user's gets it. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import final

from paceline.train.settings.schedule import run_length
from paceline.train.settings.train_config import TrainConfig


@final
@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Place of a step in its run, the same on every rank and for every number of workers.

    step             updates that the weights have had: 0 in the first step of a run
    epoch            of the step, from 0; in an evaluation, of the last step before it
    steps_per_epoch  None where it cannot be known (iterable datasets, dynamic batches)
    total_steps      of the whole run, as its settings have it; None where that cannot be known
    optimizer        the number of the optimizer whose turn it is (TrainConfig.optimizer_turns); None where
                     all of them step, and in an evaluation
    """

    step: int = 0
    epoch: int = 0
    steps_per_epoch: int | None = None
    total_steps: int | None = None
    optimizer: int | None = None

    def at(self, step: int, epoch: int, optimizer: int | None = None) -> StepInfo:
        """Return another place of the same run."""
        return dataclasses.replace(self, step=step, epoch=epoch, optimizer=optimizer)


def first_step_of(config: TrainConfig, samples: int | None) -> StepInfo:
    """Return the beginning of a run over data of `samples` samples; None: an iterable dataset."""
    length = run_length(config, samples)
    return StepInfo(steps_per_epoch=length.steps_per_epoch, total_steps=length.total_steps)
