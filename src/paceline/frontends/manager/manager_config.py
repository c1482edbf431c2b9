"""Settings of the step-by-step manager, in its users' words, and what they mean to the engine.

batch_size         samples of a step on all processes together; the engine's global_batch
micro_batch_size   samples of a forward pass of one process
learning_rate      of the optimizer that the manager makes. It rises over the first `warmup_steps` steps,
                   step n having (n + 1) / warmup_steps of it, and then stays (schedule="constant") or
                   falls to zero at `max_steps` ("linear", "cosine")
save_interval      steps between two checkpoints that train_step writes by itself
shards             slices of a step, the same however many processes are left (default: world_size)
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, final

from paceline.comm import default_group
from paceline.comm.rendezvous.environment import LaunchInfo, find_launch_info
from paceline.core import config as core_config
from paceline.core.available_resources import cores
from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import with_article
from paceline.frontends.own_words import in_words_of
from paceline.train.settings.conflicts import check, shard_sizes
from paceline.train.settings.keyword_hints import explained
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig
from paceline.train.settings.value_checks import at_least, conform, not_empty, path_as_text, positive, refuse

# The engine wants an end; a run without `max_steps` has none.
_NO_END = (1 << 31) - 1


@final
class CheckpointGranularity(Enum):
    """Which parts of the model keep no activations for backward and compute them again."""

    LAYER = "layer"
    """Every member of a Sequential or ModuleList."""
    BLOCK = "block"
    """Those of them that are made of further modules."""


# Answers to names of other libraries, and of TrainConfig.
_OTHER_NAMES = {
    "lr": "use learning_rate=...",
    "workers": "use world_size=..., or leave it out: the launcher says it",
    "num_workers": "processes that train are world_size; processes that load data are the DataLoader's",
    "rank": "use local_rank=..., or leave it out: the launcher says it",
    "global_batch": "use batch_size=..., the samples of a step on all processes together",
    "micro_batch": "use micro_batch_size=..., the samples of one forward pass of a process",
    "epochs": "the loop is yours and counts epochs; max_steps=... is the length of the schedule",
    "clip_norm": "clip_norm is a setting of paceline.TrainConfig, for paceline.Trainer",
    "run_dir": "use checkpoint_dir=...",
    "checkpoint": "use save_interval=..., which counts steps",
    "resume": "call manager.load_checkpoint(step)",
    **dict.fromkeys(
        ("model", "optimizer", "objective"),
        "give it to the call: manager.prepare_training(model, total_samples, loss_fn=..., optimizer=...)",
    ),
    **dict.fromkeys(
        ("weight_decay", "momentum", "betas"),
        "it is the optimizer's: prepare_training(..., optimizer=lambda p: torch.optim.AdamW(p, 1e-3))",
    ),
    "device": "leave it out: processes use the GPUs where there are any",
    **dict.fromkeys(
        ("train_data", "train_dataset", "dataset", "data"),
        "batches are given to manager.train_step(batch, step)",
    ),
    **dict.fromkeys(
        ("precision", "early_stopping", "evaluate_every"), "it is a setting of paceline.TrainConfig"
    ),
}


# What the settings of the training loop say, and what it is called here.
OWN_WORDS = {
    "TrainConfig": "ManagerConfig",
    "global_batch": "batch_size",
    "micro_batch": "micro_batch_size",
    "workers": "world_size",
}


@explained(hints=_OTHER_NAMES)
@final
@dataclass(frozen=True, kw_only=True)
class ManagerConfig:
    """All settings of a DistributedTrainingManager. `world_size` and `local_rank`, which is the rank of this
    process, come from the launcher where they are missing."""

    world_size: int | None = None
    local_rank: int | None = None
    num_gpus_per_node: int | None = None
    batch_size: int = 32
    micro_batch_size: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    max_steps: int | None = None
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    save_interval: int | None = None
    checkpoint_dir: str | None = None
    use_data_parallel: bool = True
    use_model_parallel: bool = False
    model_parallel_size: int = 1
    use_pipeline_parallel: bool = False
    num_pipeline_stages: int = 1
    use_gradient_checkpointing: bool = False
    checkpoint_granularity: CheckpointGranularity | str = CheckpointGranularity.LAYER
    shards: int | None = None
    seed: int = 0
    address: str | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        path_as_text(self, "checkpoint_dir")
        conform(self)
        at_least(self, "world_size", 1, "it counts processes")
        at_least(self, "local_rank", 0, "ranks are counted from 0")
        at_least(self, "num_gpus_per_node", 0, "it counts GPUs")
        at_least(self, "batch_size", 1, "it counts the samples of a step on all processes")
        at_least(self, "micro_batch_size", 1, "it counts the samples of one forward pass")
        positive(self, "learning_rate", "it is what the gradient is multiplied by")
        at_least(self, "warmup_steps", 0, "it counts steps")
        at_least(self, "max_steps", 1, "it counts steps")
        at_least(self, "save_interval", 1, "it counts the steps between two checkpoints")
        at_least(self, "shards", 1, "a step is cut into this many slices")
        positive(self, "timeout", "it is how many seconds a process waits for the others")
        not_empty(self, "checkpoint_dir")
        not_empty(self, "checkpoint_granularity")
        self._name_granularity()
        self._refuse_what_is_to_come()
        if self.save_interval is not None and self.checkpoint_dir is None:
            message = f"save_interval={self.save_interval}, and there is no checkpoint_dir to save to"
            refuse(self, "save_interval", message, "set checkpoint_dir")
        if self.schedule != "constant" and self.max_steps is None:
            message = f'schedule="{self.schedule}" falls to zero at max_steps, which is not set'
            refuse(self, "schedule", message, 'set max_steps, or use schedule="constant"')

    def _name_granularity(self) -> None:
        """Take "layer" and "BLOCK" of a file for the members of CheckpointGranularity."""
        given = self.checkpoint_granularity
        if isinstance(given, str) and given.upper() in CheckpointGranularity.__members__:
            object.__setattr__(self, "checkpoint_granularity", CheckpointGranularity[given.upper()])

    def _refuse_what_is_to_come(self) -> None:
        for flag, size, kind in (
            ("use_model_parallel", "model_parallel_size", "a model that is cut over processes"),
            ("use_pipeline_parallel", "num_pipeline_stages", "a pipeline of processes"),
        ):
            at_least(self, size, 1, "it counts processes")
            asked = f"{flag}=True" if getattr(self, flag) else ""
            if getattr(self, size) > 1:
                asked = f"{size}={getattr(self, size)}"
            if asked:
                message = f"{asked}: {kind} does not exist yet"
                refuse(
                    self, flag, message, f"leave {flag} and {size} out: every process holds the whole model"
                )

    def launched(self) -> tuple[ManagerConfig, LaunchInfo]:
        """Return the settings with what the launcher of this process knows, and where the processes meet."""
        world_size, rank, group = self.world_size, self.local_rank, default_group.current()
        if group is not None:
            world_size = group.world_size if world_size is None else world_size
            rank = group.rank if rank is None else rank
        launch = find_launch_info(os.environ, world_size, rank, self.address)
        settled = dataclasses.replace(self, world_size=launch.world_size, local_rank=launch.rank)
        _check_sizes(settled, launch.world_size)
        with in_words_of(OWN_WORDS):
            settled.to_train_config()  # refuses what does not go together, before any process is met
        return settled, launch

    def to_train_config(
        self, activation_checkpointing: bool | tuple[str, ...] = False, least_cores: int | None = None
    ) -> TrainConfig:
        """Return what these settings mean to the engine, resolved. `least_cores`: of the machine that has the
        fewest; threads are part of what the bits depend on, and all processes have the same number."""
        config = TrainConfig(
            workers=self.world_size or 1,
            shards=self.shards,
            global_batch=self.batch_size,
            micro_batch=self.micro_batch_size,
            max_steps=self.max_steps or _NO_END,
            warmup_steps=self.warmup_steps,
            schedule=self.schedule,
            seed=self.seed,
            activation_checkpointing=activation_checkpointing,
            timeout=self.timeout,
            checkpoint=CheckpointConfig(enabled=False),
            progress=False,
        )
        check(config, samples=None, validation=False)
        return config.resolved(least_cores or cores())

    def arithmetic(self) -> str:
        """Return in words how the samples of a step are divided."""
        world_size, shards = self.world_size or 1, self.to_train_config().shards or 1
        whose = f"all {world_size} processes together" if world_size > 1 else "this one process"
        text = f"a step has batch_size={self.batch_size} samples on {whose}"
        if shards > 1:
            text += f", in {shards} shards of {shard_sizes(self.batch_size, shards)}"
        if self.micro_batch_size is not None:
            text += f"; a forward pass has micro_batch_size={self.micro_batch_size} of them at most"
        return text


def read_config(config: ManagerConfig | Mapping[str, Any] | str | os.PathLike[str]) -> ManagerConfig:
    """Return the settings: given as they are, as a mapping, or as the name of a file."""
    if isinstance(config, ManagerConfig):
        return config
    if not isinstance(config, Mapping | str | os.PathLike):
        raise UsageError(
            f"the config of a manager is {with_article(config)}",
            remedy="pass a dict, the name of a JSON file, or a ManagerConfig",
        )
    if isinstance(config, Mapping):
        # A path object is as good as its text.
        config = {
            name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in config.items()
        }
    return core_config.load(ManagerConfig, config)


# Answers of the manager's constructor, which takes the config and nothing else.
OF_MANAGER = {
    **_OTHER_NAMES,
    **{
        field.name: f'it belongs to the config: DistributedTrainingManager({{"{field.name}": ...}})'
        for field in dataclasses.fields(ManagerConfig)
    },
    "lr": 'it belongs to the config: DistributedTrainingManager({"learning_rate": ...})',
}


def check_count(what: str, name: str, value: object, least: int = 1) -> None:
    """Refuse an argument of the call `what` that counts, and is no such number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{what}: {name}={value!r}", remedy=f"{name} is a whole number from {least} up")


def _check_sizes(config: ManagerConfig, world_size: int) -> None:
    if world_size > 1 and not config.use_data_parallel:
        raise ConfigError(
            f"use_data_parallel=False with world_size={world_size}: nothing else divides the work of a step",
            remedy="leave use_data_parallel out, or start one process",
            key="use_data_parallel",
        )
    if config.batch_size < world_size:
        raise ConfigError(
            f"batch_size={config.batch_size} for world_size={world_size}: it counts the samples of a step on "
            "all processes together, and some would have none",
            remedy=f"set batch_size to {world_size} or more, or start fewer processes",
            key="batch_size",
        )
    micro = config.micro_batch_size
    if micro is not None and micro * world_size > config.batch_size:
        share = config.batch_size / world_size
        raise ConfigError(
            f"micro_batch_size={micro} is larger than batch_size / world_size = "
            f"{config.batch_size} / {world_size} = {share:g}, the samples that a process has in a step",
            remedy=f"set micro_batch_size to {max(1, int(share))} or fewer, or batch_size to "
            f"{micro * world_size} or more",
            key="micro_batch_size",
        )
