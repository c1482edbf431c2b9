"""What keeps a dry run apart from real runs: it keeps nothing, and leaves the caller's objects alone.

`TrainConfig(dry_run=True)` goes through everything once (workers, data, steps, the end of an epoch,
evaluation, a checkpoint) in two epochs of one step; how short that is, is the loop's business. Imports no
torch.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

from paceline.train.callbacks import Modifier, Observer
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig


def dry_settings(config: TrainConfig) -> TrainConfig:
    """Return the settings of a dry run without a folder and a past; those of any other run as they are.

    On an engine it writes no checkpoint: its folder is a temporary one, which no node sees.
    """
    if not config.dry_run:
        return config
    saved = config.checkpoint
    return dataclasses.replace(
        config,
        run_dir=False,
        resume=None,
        profile=None,
        checkpoint=CheckpointConfig(
            every_epochs=1,
            metric=saved.metric,
            mode=saved.mode,
            enabled=saved.enabled and config.engine is None,
        ),
        fault_tolerance=dataclasses.replace(config.fault_tolerance, chaos=None),
    )


def dry_callbacks(callbacks: Sequence[Observer | Modifier]) -> tuple[Modifier, ...]:
    """Return copies of the modifiers, whose own state stays as it is. Observers would write what is to be
    left out."""
    return tuple(copy.deepcopy(one) for one in callbacks if isinstance(one, Modifier))
