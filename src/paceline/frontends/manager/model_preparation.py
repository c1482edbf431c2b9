"""What the manager trains, and where: the model, its objective, its device, which of its parts are
recomputed; and the run of steps that is made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.core import atomic_file
from paceline.core.errors import UnavailableError, UsageError
from paceline.core.wording import with_article
from paceline.frontends.announcements import announce
from paceline.frontends.chosen_parts import objective_for, optimizer_for
from paceline.frontends.manager.manager_config import CheckpointGranularity, ManagerConfig
from paceline.frontends.manager.manager_group import ManagerGroup
from paceline.train.loop import process_setup
from paceline.train.loop.run_hooks import MicroBatch
from paceline.train.loop.stepwise_run import StepwiseRun, StepwiseSpec
from paceline.train.objective import Objective, split_pair
from paceline.train.settings.train_config import TrainConfig, to_toml
from paceline.train.step.misuse_guard import refuse_wrapped


def check_model(model: object) -> nn.Module:
    """Refuse what cannot be trained."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is {with_article(model)}", remedy="pass a torch.nn.Module")
    process_setup.check_initialised(model)
    refuse_wrapped(model)
    return model


def choose_device(config: ManagerConfig) -> torch.device:
    """Return this process's GPU, of those that the settings count; the CPU where there is none."""
    wanted, found = config.num_gpus_per_node, torch.cuda.device_count()
    if wanted and found == 0:
        announce(f"num_gpus_per_node={wanted}, and torch finds no GPU here: training on the CPU")
    if wanted == 0 or found == 0:
        return torch.device("cpu")
    if wanted is not None and wanted > found:
        raise UnavailableError(
            f"num_gpus_per_node={wanted}, and this machine has {found}",
            remedy=f"set num_gpus_per_node to {found} or fewer, or leave it out",
        )
    device = torch.device("cuda", (config.local_rank or 0) % (wanted or found))
    torch.cuda.set_device(device)
    return device


def recompute(config: ManagerConfig, model: nn.Module, stack: ExitStack) -> bool | tuple[str, ...]:
    """Have the parts that the settings ask for keep no activations until `stack` is closed; return these
    parts as the engine's settings name them."""
    granularity = config.checkpoint_granularity
    if not config.use_gradient_checkpointing:
        return False
    try:
        which = _parts(granularity, model)
        stack.enter_context(process_setup.recomputing(model, which))
    except UsageError as error:
        name = granularity.name if isinstance(granularity, CheckpointGranularity) else repr(granularity)
        raise UsageError(f"checkpoint_granularity={name}: {error.message}", remedy=error.remedy) from error
    return which


def _parts(granularity: CheckpointGranularity | str, model: nn.Module) -> bool | tuple[str, ...]:
    if granularity is CheckpointGranularity.LAYER:
        return True
    if granularity is CheckpointGranularity.BLOCK:
        return process_setup.classes_of_blocks(model)
    return (str(granularity),)


@final
class ManagedObjective:
    """The objective of a model; where the caller gives no loss, the targets of the first micro-batch choose
    it."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        self.module = module
        self._objective = None if loss_fn is None else Objective(objective_for(loss_fn, lambda: None))

    def to(self, device: torch.device) -> None:
        if self._objective is not None:
            self._objective.to(device)

    def compute(self, micro: MicroBatch) -> tuple[Tensor, Mapping[str, Any]]:
        """Return the loss of a micro-batch, a mean, and its metrics."""
        if self._objective is None:
            self._objective = Objective(objective_for(None, lambda: split_pair(micro.data)[1]))
        scored = self._objective.evaluate(self.module, micro.data, micro.info)
        return scored.loss, scored.metrics


def build_run(
    config: ManagerConfig,
    group: ManagerGroup,
    objective: ManagedObjective,
    optimizer: Any,
    samples: int,
    stack: ExitStack,
) -> StepwiseRun:
    """Build the run of these settings on this process; `stack` closes it. Talks to no other process."""
    device, module = choose_device(config), objective.module
    settings = config.to_train_config(recompute(config, module, stack), group.least_cores)
    optimizer = optimizer_for(optimizer, config.learning_rate)
    objective.to(device)
    spec = StepwiseSpec(module.to(device).train(), optimizer, settings, samples, device)
    run = StepwiseRun(group.context, spec)
    stack.callback(run.close)
    return run


def write_settings(store: CheckpointStore | None, config: TrainConfig, context: DistributedContext) -> None:
    """Write the settings beside the checkpoints, in the words of every other way to train."""
    if store is not None and store.storage.exclusive and context.is_master:
        folder = Path(store.url)
        folder.mkdir(parents=True, exist_ok=True)
        atomic_file.replace_file(folder / "config.toml", to_toml(config).encode())
