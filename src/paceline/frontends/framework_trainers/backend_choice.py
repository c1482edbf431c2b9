"""`paceline.make_trainer`: the trainer of the framework that the settings name."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline.frontends.ddp_trainer.distributed_config import (
    DistributedConfig,
    check_backend,
    gpus_here,
    loaded,
    under_overrides,
)
from paceline.frontends.framework_trainers.framework_settings import settings_trackers
from paceline.train.callbacks import as_list


def make_trainer(model: Any, config: Any = None, **parts: Any) -> Any:
    """Return the trainer of `config.backend` for a model: PyTorchDDPTrainer, HorovodTrainer, RayTrainer or
    TensorFlowDistributedTrainer.

    `config` is a DistributedConfig, a dict or a file of it; `model` is what the trainer takes first (for
    TensorFlow a function that returns a compiled model), `parts` are its other arguments (optimizer, loss_fn,
    callbacks, ...). `paceline train --backend` wins over the settings.
    """
    chosen = under_overrides(loaded(config))
    check_backend(chosen.backend)
    if chosen.backend == "horovod":
        from paceline.frontends.framework_trainers.horovod_trainer import HorovodTrainer

        return HorovodTrainer(model, config=chosen, **parts)
    if chosen.backend == "tensorflow":
        from paceline.frontends.framework_trainers.tensorflow_trainer import TensorFlowDistributedTrainer

        return TensorFlowDistributedTrainer(model, config=chosen, **parts)
    if chosen.backend == "ray":
        from paceline.frontends.ray_trainer.ray_trainer import RayTrainer

        callbacks = [*as_list(parts.pop("callbacks", ())), *settings_trackers(chosen)]
        return RayTrainer(model, settings_for_ray(chosen), callbacks=callbacks, **parts)
    from paceline.frontends.ddp_trainer.ddp_trainer import PyTorchDDPTrainer

    return PyTorchDDPTrainer(model, config=chosen, **parts)


def settings_for_ray(config: DistributedConfig) -> dict[str, Any]:
    """Return the settings as RayTrainer takes them: with a batch of all workers together, and a shard for
    each forward pass. Workers have a GPU each where this host has one, or NCCL is asked for: the process that
    hands a run to a cluster need not have what the cluster has."""
    workers = config.num_gpus or config.num_nodes * (config.gpus_per_node or 1)
    meant = dataclasses.replace(
        config, backend="pytorch-ddp", num_gpus=workers, num_nodes=1, gpus_per_node=None
    ).to_train_config()
    chosen = {
        "clip_norm": meant.clip_norm,
        "precision": meant.precision,
        "log_every": meant.log_every,
        "run_dir": meant.run_dir,
        "checkpoint": {"every_epochs": meant.checkpoint.every_epochs, "url": meant.checkpoint.url},
    }
    return {
        "lr": config.learning_rate,
        "batch_size": meant.global_batch,
        "epochs": config.epochs,
        "num_workers": workers,
        "use_gpu": config.communication_backend == "nccl" or gpus_here() > 0,
        "shards": meant.shards,
        **{name: value for name, value in chosen.items() if value is not None},
    }
