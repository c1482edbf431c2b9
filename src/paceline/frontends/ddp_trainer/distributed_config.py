"""`paceline.DistributedConfig`: settings that count per GPU, as users of DistributedDataParallel write them.

`to_train_config` gives them their global meaning. Reads and writes through `paceline.core.config`. Importing
this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, final

from paceline.core import config as core_config
from paceline.core.errors import UnavailableError, UsageError
from paceline.core.wording import counted, with_article
from paceline.frontends import overrides
from paceline.frontends.own_words import in_words_of
from paceline.train.settings.keyword_hints import explained
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig
from paceline.train.settings.value_checks import (
    at_least,
    conform,
    not_empty,
    path_as_text,
    positive,
    refuse,
)

_SHARDED = "sharded models are to come: leave it out; every GPU holds the whole model"
OTHER_NAMES = {
    "zero_stage": _SHARDED,
    "deepspeed_config": _SHARDED,
    "deepspeed": _SHARDED,
    "lr": "use learning_rate=...",
    "global_batch": "batch_size counts the samples of one GPU: the global batch is batch_size x "
    "gradient_accumulation_steps x num_gpus",
    "workers": "use num_gpus=..., which counts CPU workers where there is no GPU",
    "num_workers": "use num_gpus=... for processes that train; processes that load data are the DataLoader's",
    "clip_norm": "use gradient_clipping=...",
    "micro_batch": "use gradient_accumulation_steps=...; a forward pass has batch_size samples",
    "precision": "use mixed_precision=True for fp16; without it numbers are fp32",
    "max_steps": "give it to fit: trainer.fit(train_loader, max_steps=...)",
    "schedule": "use scheduler=lambda optimizer: ..., of PyTorchDDPTrainer",
    "scheduler": "give it to the trainer: PyTorchDDPTrainer(scheduler=lambda optimizer: ...)",
    "resume": "use resume_from_checkpoint=True, of PyTorchDDPTrainer",
    "checkpoint": "use checkpoint_frequency=..., which counts epochs",
    "device": "use num_gpus=...; without a GPU the workers use the CPU",
    "logger": "use tensorboard=True or mlflow_tracking=True",
    "objective": "use loss_fn=..., of PyTorchDDPTrainer",
    "optimizer": "give it to the trainer: PyTorchDDPTrainer(optimizer=lambda p: torch.optim.AdamW(p, 1e-3))",
    **dict.fromkeys(
        ("weight_decay", "momentum", "betas"),
        "it is the optimizer's: PyTorchDDPTrainer(optimizer=lambda p: torch.optim.AdamW(p, 1e-3))",
    ),
    **dict.fromkeys(
        ("train_data", "train_dataset", "train_loader", "train_dataloader", "dataset", "data"),
        "data is given to fit: trainer.fit(train_loader, val_loader)",
    ),
    **dict.fromkeys(
        ("seed", "early_stopping", "evaluate_every", "warmup_steps"),
        "it is a setting of paceline.TrainConfig",
    ),
}
# Package of each backend, and how it is installed.
_PACKAGES = {
    "horovod": ("horovod", "pip install horovod, built for this torch: see docs/other-frameworks.md"),
    "ray": ("ray", "pip install 'paceline[ray]'"),
    "tensorflow": ("tensorflow", "pip install tensorflow (without a GPU: tensorflow-cpu)"),
}
_TRAINERS = {"horovod": "HorovodTrainer", "ray": "RayTrainer", "tensorflow": "TensorFlowDistributedTrainer"}


@explained(hints=OTHER_NAMES)
@final
@dataclass(frozen=True)
class DistributedConfig:
    """Settings of a training with counts per GPU.

    num_gpus                     in all nodes together; None: num_nodes x gpus_per_node, in a job its ranks,
                                 else all GPUs of this host, else 1; without a GPU it counts CPU workers
    batch_size                   samples of one GPU's forward pass
    gradient_accumulation_steps  forward passes of one GPU before the weights change
    checkpoint_frequency         epochs between two checkpoints; None: as TrainConfig does
    checkpoint_dir               folder of the run, or a URL of checkpoints; None: a new one below runs/
    """

    num_gpus: int | None = None
    num_nodes: int = 1
    gpus_per_node: int | None = None
    backend: Literal["pytorch-ddp", "horovod", "ray", "tensorflow"] = "pytorch-ddp"
    batch_size: int = 32
    epochs: int = 1
    learning_rate: float = 1e-3
    mixed_precision: bool = False
    gradient_accumulation_steps: int = 1
    gradient_clipping: float | None = None
    communication_backend: Literal["nccl", "gloo", "mpi"] | None = None
    find_unused_parameters: bool = False
    checkpoint_frequency: int | None = None
    checkpoint_dir: str | None = None
    mlflow_tracking: bool = False
    tensorboard: bool = False
    log_every_n_steps: int = 50

    def __post_init__(self) -> None:
        path_as_text(self, "checkpoint_dir")
        conform(self)
        at_least(self, "num_gpus", 1, "a run needs a worker")
        at_least(self, "num_nodes", 1, "a run needs a machine")
        at_least(self, "gpus_per_node", 1, "a node without a worker takes no part")
        at_least(self, "batch_size", 1, "it counts the samples of one GPU's forward pass")
        at_least(self, "epochs", 1, "it counts passes over the data")
        at_least(self, "gradient_accumulation_steps", 1, "it counts the forward passes of one GPU's step")
        at_least(self, "checkpoint_frequency", 1, "it counts the epochs between two checkpoints")
        at_least(self, "log_every_n_steps", 1, "it counts the steps between two lines")
        positive(self, "learning_rate", "it multiplies every step")
        positive(self, "gradient_clipping", "gradients are scaled down to this norm")
        not_empty(self, "checkpoint_dir")
        _check_nodes(self)

    @property
    def workers(self) -> int:
        """The number of GPUs in all nodes together; without a GPU, of CPU workers."""
        chosen = overrides.current().workers
        if chosen is not None:
            return chosen
        if self.num_gpus is not None:
            return self.num_gpus
        if self.gpus_per_node is not None:
            return self.num_nodes * self.gpus_per_node
        return ranks_of_this_job() or self.num_nodes * max(1, gpus_here())

    @property
    def effective_batch(self) -> int:
        """The global batch: samples of one step, all GPUs and accumulation steps together."""
        return self.batch_size * self.gradient_accumulation_steps * self.workers

    @property
    def arithmetic(self) -> str:
        """How the global batch comes about, in a sentence."""
        return (
            f"global batch {self.effective_batch} = batch_size {self.batch_size} x "
            f"gradient_accumulation_steps {self.gradient_accumulation_steps} x num_gpus {self.workers}"
        )

    def to_train_config(self) -> TrainConfig:
        """Return the same with its global meaning, for `paceline.Trainer`.

        A shard of a step is one forward pass of batch_size samples, so that the result depends on the global
        batch and on batch_size, and not on whether GPUs or accumulation steps make up the rest. The learning
        rate is the optimizer's: `Trainer` gets it there.
        """
        if self.backend != "pytorch-ddp":
            check_backend(self.backend)
            raise UsageError(
                f'backend="{self.backend}" in settings of a training that PyTorch itself distributes',
                remedy=f"use paceline.make_trainer(model, config), or paceline.{_TRAINERS[self.backend]}",
            )
        folder = self.checkpoint_dir
        is_url = folder is not None and "://" in folder
        usual = CheckpointConfig()
        every = usual.every_epochs if self.checkpoint_frequency is None else self.checkpoint_frequency
        return TrainConfig(
            workers=self.workers,
            shards=self.workers * self.gradient_accumulation_steps,
            global_batch=self.effective_batch,
            epochs=self.epochs,
            precision="fp16" if self.mixed_precision else "fp32",
            clip_norm=self.gradient_clipping,
            log_every=self.log_every_n_steps,
            checkpoint=CheckpointConfig(every_epochs=every, url=folder if is_url else None),
            run_dir=None if is_url else folder,
        )

    def refuse_lonely_nodes(self) -> None:
        """Refuse a training of several nodes in a process that no launcher has made a rank of it."""
        if self.num_nodes > 1 and ranks_of_this_job() is None:
            raise UsageError(
                f"num_nodes={self.num_nodes}, and this process is no rank of a job: it can start workers on "
                "its own host only",
                remedy=f"start the script on every node: torchrun --nnodes {self.num_nodes} --nproc-per-node "
                f"{self.workers // self.num_nodes} --node-rank ... --master-addr ... SCRIPT; or leave "
                "num_nodes out",
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as TOML, JSON or YAML, by the suffix of the file."""
        return core_config.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> DistributedConfig:
        """Read what `save` wrote, or a file written by hand: what it does not name has its default."""
        return core_config.load(DistributedConfig, path)


def loaded(config: object) -> DistributedConfig:
    """Return the settings that a caller gives as an object, a dict or a file; None: the defaults."""
    if config is None:
        return DistributedConfig()
    if isinstance(config, DistributedConfig):
        return config
    if isinstance(config, str | os.PathLike | Mapping):
        return core_config.load(DistributedConfig, config)
    raise UsageError(
        f"config is {with_article(config)}", remedy="give a DistributedConfig, a dict or a file of it"
    )


def under_overrides(config: DistributedConfig) -> DistributedConfig:
    """Return the settings with what `paceline train` sets in their place."""
    texts = overrides.current().per_gpu()
    return (
        core_config.load(DistributedConfig, dataclasses.asdict(config), overrides=texts) if texts else config
    )


def with_arguments(config: object, given: Mapping[str, Any]) -> DistributedConfig:
    """Return the settings of `config` with those arguments in their place that are not their default, and
    what `paceline train --config` sets in place of both."""
    base, usual = loaded(config), DistributedConfig()
    names = [field.name for field in dataclasses.fields(DistributedConfig) if field.name in given]
    with in_words_of({"DistributedConfig": "PyTorchDDPTrainer"}):  # whose arguments these are
        chosen = dataclasses.replace(
            base, **{name: given[name] for name in names if given[name] != getattr(usual, name)}
        )
    return under_overrides(chosen)


def gpus_here() -> int:
    """Return the number of GPUs that torch can use on this host."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def ranks_of_this_job() -> int | None:
    """Return the size of the job that this process is a rank of; None outside of a job."""
    from paceline.comm import default_group
    from paceline.comm.rendezvous.environment import find_launch_info

    context = default_group.current()
    size = find_launch_info(os.environ).world_size if context is None else context.world_size
    return size if context is not None or size > 1 else None


def _check_nodes(config: DistributedConfig) -> None:
    total, nodes, each = config.num_gpus, config.num_nodes, config.gpus_per_node
    if total is None:
        return
    if each is not None and nodes * each != total:
        nodes_text = counted(nodes, "node")
        refuse(
            config,
            "num_gpus",
            f"num_gpus={total} in {nodes_text} of {each}: num_nodes={nodes} x gpus_per_node={each} = "
            f"{nodes * each}, not {total}",
            f"set num_gpus={nodes * each}, or leave it out",
        )
    if total % nodes:
        refuse(
            config,
            "num_nodes",
            f"num_gpus={total} in {counted(nodes, 'node')}: {total} / {nodes} = {total / nodes:g} for each",
            f"set num_gpus to a multiple of {nodes}",
        )


def check_backend(backend: str) -> None:
    """Refuse a backend that is none, and one whose package is not installed, with what to install."""
    if backend == "pytorch-ddp":
        return
    if backend not in _PACKAGES:
        raise UsageError(
            f"backend={backend!r} is unknown",
            remedy='use "pytorch-ddp", which needs nothing but torch, "horovod", "ray" or "tensorflow"',
        )
    package, remedy = _PACKAGES[backend]
    if find_spec(package) is None:
        raise UnavailableError(
            f'backend="{backend}" needs the package {package}, which is not installed',
            remedy=f'{remedy}; or use backend="pytorch-ddp", which needs nothing but torch',
        )
