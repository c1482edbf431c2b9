"""A rank's checkpointer, and what the ranks save."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.core import events
from paceline.train.settings.train_config import CheckpointConfig
from paceline.train.state.checkpointing import Checkpointer
from paceline.train.team import Team

SHARED = {f"model/{name}": torch.full((size,), float(size)) for name, size in (("a", 5), ("b", 3), ("c", 8))}


def saver_of(
    context: DistributedContext, place: Path, told: list[events.Event], *, writes: bool
) -> Checkpointer:
    saver = Checkpointer(
        CheckpointConfig(),
        CheckpointStore(place),
        Team(context, 4),
        run="mark",
        patience=10.0,
        tell=told.append,
        on_saved=lambda saved: None,
        writes=writes,
    )
    saver.rebind()
    return saver
