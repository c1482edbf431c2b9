"""Names that other libraries give to settings: an unknown keyword is answered with the right one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.core.errors import ConfigError

T = TypeVar("T", bound=type)

_OPTIMIZER = "the learning rate is the optimizer's: Trainer(optimizer=lambda p: torch.optim.AdamW(p, 1e-3))"
_DATA = "data is given to fit: trainer.fit(train_data, val_data)"
_SETTINGS = {
    "global_batch": ("batch_size", "train_batch_size", "per_device_train_batch_size", "batch"),
    "epochs": ("max_epochs", "num_epochs", "num_train_epochs", "n_epochs", "epoch"),
    "max_steps": ("steps", "num_steps", "max_train_steps", "max_iters", "iterations"),
    "workers": ("num_workers", "n_workers", "nproc_per_node", "num_processes", "world_size", "devices"),
    "device": ("gpus", "accelerator", "use_cuda", "use_gpu"),
    "micro_batch": ("gradient_accumulation_steps", "accumulate_grad_batches", "micro_batch_size"),
    "clip_norm": ("max_grad_norm", "gradient_clip_val", "grad_clip", "clip_grad_norm"),
    "precision": ("fp16", "bf16", "amp", "mixed_precision", "dtype"),
    "schedule": ("scheduler", "lr_scheduler", "lr_schedule", "lr_scheduler_type"),
    "run_dir": ("output_dir", "save_dir", "log_dir", "logdir", "default_root_dir", "folder"),
    "resume": ("resume_from_checkpoint", "ckpt_path", "checkpoint_path"),
    "early_stopping": ("patience",),
    "evaluate_every": ("eval_steps", "val_check_interval"),
    "seed": ("random_state", "random_seed"),
}
_SETTING_OF = {other: name for name, others in _SETTINGS.items() for other in others}
_TRAINER_OF = {
    **dict.fromkeys(("loss", "loss_fn", "criterion", "loss_function"), "objective"),
    **dict.fromkeys(("net", "module"), "model"),
    **dict.fromkeys(("optimizers", "optim"), "optimizer"),
    **dict.fromkeys(("settings", "args", "cfg"), "config"),
}
_HINTS = {
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum", "betas"), _OPTIMIZER),
    **dict.fromkeys(
        ("train_data", "train_dataset", "dataset", "data", "train_dataloader", "dataloader", "val_data"),
        _DATA,
    ),
}
_OF_TRAINER = ("model", "objective", "optimizer", "callbacks")


def explained(settings: type | None = None) -> Callable[[T], T]:
    """Decorate a class: an unknown keyword to its constructor is a ConfigError that names the right one.

    `settings`: the dataclass of settings that the class takes beside its own arguments.
    """

    def decorate(cls: T) -> T:
        made: Callable[..., None] = vars(cls)["__init__"]
        known = [name for name in inspect.signature(made).parameters if name != "self"]

        @functools.wraps(made)
        def init(self: Any, *arguments: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    remedy = _remedy(settings, name, known)
                    raise ConfigError(f"{cls.__name__} has no setting {name!r}", remedy=remedy, key=name)
            made(self, *arguments, **given)

        setattr(cls, "__init__", init)  # noqa: B010 - a type checker keeps the one that it knows
        return cls

    return decorate


def _remedy(settings: type | None, name: str, known: list[str]) -> str:
    if name in _HINTS:
        return _HINTS[name]
    if settings is None:
        if name in _OF_TRAINER or name in _TRAINER_OF:
            return f"give it to the Trainer: paceline.Trainer({_TRAINER_OF.get(name, name)}=...)"
        right = _SETTING_OF.get(name)
        if right in known:
            return f"use {right}=..."
    else:
        if name in _TRAINER_OF:
            return f"use {_TRAINER_OF[name]}=..."
        right = _SETTING_OF.get(name, name)
        if right in {field.name for field in dataclasses.fields(settings)}:
            return f"it belongs to the settings: config=paceline.{settings.__name__}({right}=...)"
    near = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(known)}"
