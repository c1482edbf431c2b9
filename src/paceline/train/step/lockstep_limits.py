"""Which runs compute the shards of a step together (lockstep.py), and what does not go with it, by name."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.train.settings.train_config import TrainConfig
from paceline.train.step.sync_batch_norm import synced_layers

_OTHER_LAYERS = (
    "use BatchNorm, which takes its statistics from a shard, or GroupNorm or LayerNorm, which need no batch"
)


def needs_lockstep(module: nn.Module, config: TrainConfig, *, own_loop: bool) -> bool:
    """Return whether a step needs all of its shards at once; refuse what such a step cannot do. `own_loop`:
    the losses are computed by code of the user's own, one after the other."""
    layers = synced_layers(module)
    if not layers:
        return False
    name = next(iter(layers)) or "only layer"
    which = f"the model's {name} is a SyncBatchNorm, which takes its statistics from the global batch"
    batch = config.global_batch if config.dynamic_batch is None else config.dynamic_batch.max
    shards = config.chosen_shards
    if config.micro_samples is not None and config.micro_samples < -(-batch // shards):
        _refuse(
            f"{which}, and a shard is computed in micro-batches of {config.micro_samples}, each by itself",
            f"leave micro_batch out; for less memory take more shards on more workers; or {_OTHER_LAYERS}",
        )
    if shards == 1 and config.mode == "exact":
        return False  # a pass holds the global batch
    if own_loop:
        _refuse(
            f"{which}, and a loop of your own computes the {counted(shards, 'shard')} of a batch one after "
            "the other",
            "train with Trainer, which computes them together; or use shards=1 without micro_batch, on one "
            f"worker; or {_OTHER_LAYERS}",
        )
    if config.compile:
        _refuse(
            f"{which}, and compile=True makes one kernel of what has to wait there for the other shards",
            f"leave compile out, or {_OTHER_LAYERS}",
        )
    if config.fault_tolerance.stragglers == "backup":
        _refuse(
            f'{which}, and stragglers="backup" computes single shards of slow workers again',
            f'set fault_tolerance.stragglers to "rebalance", "replace" or "wait", or {_OTHER_LAYERS}',
        )
    for child in module.modules():
        inside = synced_layers(child)
        if inside and _is_recomputed(child):
            _refuse(
                f"{which}, and activation_checkpointing computes {type(child).__name__} again in the "
                "backward pass, where the other shards do not wait for it",
                "name classes of modules without SyncBatchNorm in activation_checkpointing, or leave it out",
            )
    if any(one.process_group is not None for one in layers.values()):
        _refuse(
            f"{which}, and it was given a process_group, a part of the ranks: which shards these have "
            "changes with the workers",
            "leave process_group out",
        )
    if own := next(
        (one for one in layers.values() if type(one).forward is not nn.SyncBatchNorm.forward), None
    ):
        _refuse(
            f"{which}, and {type(own).__name__} has a forward of its own, which would not be called",
            "use nn.SyncBatchNorm itself, inside of a module that does the rest",
        )
    return True


def refuse_synced_layers(module: nn.Module, why: str) -> None:
    """Refuse a model with SyncBatchNorm where batches are computed one by one, because of `why`."""
    for name in synced_layers(module):
        _refuse(
            f"the model's {name or 'only layer'} is a SyncBatchNorm, which takes its statistics from the "
            f"global batch, and {why}",
            f"train with synchronous steps, or {_OTHER_LAYERS}",
        )


def _is_recomputed(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint


def _refuse(message: str, remedy: str) -> NoReturn:
    raise UsageError(message, remedy=remedy)
