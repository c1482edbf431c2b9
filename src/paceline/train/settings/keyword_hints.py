"""Names that other libraries give to settings: an unknown one is answered with the right one.

Every settings class is `explained`: its constructor answers an unknown keyword, and `core.config` an unknown
key of a file or a dict, from the same tables.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.traceback_filter import fold

T = TypeVar("T", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_OPTIMIZER = "the learning rate is the optimizer's: Trainer(optimizer=lambda p: torch.optim.AdamW(p, 1e-3))"
_DATA = "data is given to fit: trainer.fit(train_data, val_data)"
_LOADERS = "processes that load data are the DataLoader's: DataLoader(data, num_workers=...)"
# What other libraries call a setting of TrainConfig.
_SETTINGS = {
    "global_batch": ("batch_size", "train_batch_size", "per_device_train_batch_size", "batch"),
    "epochs": ("max_epochs", "num_epochs", "num_train_epochs", "n_epochs", "nb_epochs", "epoch"),
    "max_steps": ("steps", "num_steps", "max_train_steps", "max_iters", "iterations", "total_steps"),
    "workers": ("n_workers", "nproc_per_node", "num_processes", "world_size", "devices", "num_gpus", "gpus"),
    "device": ("accelerator", "use_cuda", "use_gpu", "use_cpu", "no_cuda"),
    "micro_batch": (
        "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps", "micro_batch_size"
    ),
    "clip_norm": (
        "max_grad_norm", "gradient_clip_val", "gradient_clipping", "gradient_clip", "grad_clip",
        "clip_grad_norm",
    ),
    "precision": ("fp16", "bf16", "amp", "use_amp", "mixed_precision", "dtype"),
    "schedule": ("lr_schedule", "lr_scheduler_type"),
    "warmup_steps": ("num_warmup_steps", "warmup"),
    "run_dir": (
        "output_dir", "save_dir", "log_dir", "logdir", "default_root_dir", "folder", "project_dir",
        "checkpoint_dir",
    ),
    "resume": ("resume_from_checkpoint", "ckpt_path", "checkpoint_path"),
    "early_stopping": ("patience",),
    "evaluate_every": ("eval_steps", "val_check_interval", "eval_every"),
    "log_every": ("log_every_n_steps", "logging_steps", "log_interval"),
    "limit_batches": ("limit_train_batches",),
    "limit_validation": ("limit_val_batches",),
    "dry_run": ("fast_dev_run",),
    "progress": ("enable_progress_bar", "disable_tqdm", "verbose"),
    "activation_checkpointing": ("gradient_checkpointing", "use_gradient_checkpointing"),
    "compile": ("torch_compile",),
    "seed": ("random_state", "random_seed"),
    "checkpoint": (
        "save_steps", "save_interval", "save_every", "save_total_limit", "save_strategy",
        "every_n_train_steps", "checkpoint_frequency", "checkpoint_interval", "enable_checkpointing",
        "load_best_model_at_end",
    ),
}  # fmt: skip
_SETTING_OF = {other: name for name, others in _SETTINGS.items() for other in others}
_SYNCED_NORM = (
    "it is a layer of the model: nn.SyncBatchNorm.convert_sync_batchnorm(model) has the statistics of the "
    "global batch; BatchNorm takes them from a shard"
)
# Where the other name means another unit or another place than the setting.
_MEANINGS = {
    "num_workers": f"use workers=... for processes that train; {_LOADERS}",
    "dataloader_num_workers": _LOADERS,
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum_steps"),
        "use micro_batch=..., the samples of one forward pass; global_batch stays the samples of a step",
    ),
    **dict.fromkeys(
        ("fp16", "bf16", "amp", "use_amp", "mixed_precision"), 'use precision="bf16" or precision="fp16"'
    ),
    **dict.fromkeys(
        ("save_steps", "save_interval", "every_n_train_steps", "save_every"),
        "use checkpoint=CheckpointConfig(every_steps=...)",
    ),
    **dict.fromkeys(
        ("checkpoint_frequency", "checkpoint_interval", "save_strategy"),
        "use checkpoint=CheckpointConfig(every_epochs=...)",
    ),
    "save_total_limit": "use checkpoint=CheckpointConfig(keep_last=...)",
    "enable_checkpointing": "use checkpoint=CheckpointConfig(enabled=...)",
    "load_best_model_at_end": 'use early_stopping=EarlyStopping(restore_best=True), or trainer.load("best")',
    "patience": "use early_stopping=EarlyStopping(patience=...)",
    "deterministic": 'leave it out: mode="exact", the default, gives the same bits every time',
    **dict.fromkeys(
        ("strategy", "ddp", "find_unused_parameters", "sync_ddp"),
        "leave it out: every worker holds the model, and gradients are summed for you",
    ),
    **dict.fromkeys(
        ("num_nodes", "nnodes"),
        "start the script with `paceline run --nnodes N`, or let machines join: `paceline join`",
    ),
    **dict.fromkeys(
        ("logger", "loggers", "report_to", "tensorboard", "mlflow_tracking"),
        "trackers are callbacks: Trainer(callbacks=[paceline.TensorBoard()])",
    ),
    **dict.fromkeys(("sync_batch_norm", "sync_batchnorm", "sync_bn"), _SYNCED_NORM),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum", "betas"), _OPTIMIZER),
    **dict.fromkeys(
        ("train_data", "train_dataset", "dataset", "data", "train_dataloader", "dataloader", "val_data"),
        _DATA,
    ),
}
_TRAINER_OF = {
    **dict.fromkeys(("loss", "loss_fn", "criterion", "loss_function"), "objective"),
    **dict.fromkeys(("net", "module"), "model"),
    **dict.fromkeys(("optimizers", "optim"), "optimizer"),
    **dict.fromkeys(("lr_scheduler", "schedulers"), "scheduler"),
    **dict.fromkeys(("settings", "args", "cfg"), "config"),
    **dict.fromkeys(("metrics", "compute_metrics", "eval_metrics"), "evaluation"),
}
# Answers of the classes whose objects are values of TrainConfig's settings.
OF_PARTS = {
    **{name: f"it belongs to TrainConfig: TrainConfig({name}=...)" for name in _SETTINGS},
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum", "betas"), _OPTIMIZER),
}
# Answers of the settings that belong to checkpoints and to the best of them.
OF_CHECKPOINTS = {
    **{name: answer for name, answer in OF_PARTS.items() if name not in ("checkpoint", "early_stopping")},
    **dict.fromkeys(("save_steps", "every_n_train_steps", "save_interval"), "use every_steps=..."),
    **dict.fromkeys(("every_n_epochs", "checkpoint_frequency"), "use every_epochs=..."),
    "save_total_limit": "use keep_last=...",
    "save_top_k": "use keep_best=...",
    "monitor": "use metric=...",
    "run_dir": "use url=..., or run_dir=... of TrainConfig",
}
_OF_TRAINER = ("model", "objective", "optimizer", "callbacks", "scheduler", "evaluation")


def explained(settings: type | None = None, hints: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """Decorate a class: an unknown keyword to its constructor is a ConfigError that names the right one.

    `settings`: the dataclass of settings that the class takes beside its own arguments.
    `hints`: what to answer to some names in this class, other libraries' or TrainConfig's (which stand for
    all names that other libraries have for them). Without hints, answers are those for TrainConfig.
    """

    def decorate(cls: T) -> T:
        made: Callable[..., None] = vars(cls)["__init__"]
        known = [name for name in inspect.signature(made).parameters if name != "self"]

        def answer(name: str) -> str:
            return _answer(name, known, settings, hints)

        @functools.wraps(made)
        def init(self: Any, *arguments: Any, **given: Any) -> None:
            try:
                # A class of the user's is named by its own name.
                _refuse_unknown(type(self).__name__, given, known, answer)
                made(self, *arguments, **given)
            except PacelineError as error:
                fold(error)
                raise

        for name, value in (("__init__", init), ("__explain_key__", staticmethod(answer))):
            setattr(cls, name, value)  # a type checker keeps the constructor that it knows
        return cls

    return decorate


def explained_function(settings: type) -> Callable[[F], F]:
    """Decorate a function that takes `settings` beside its own arguments, as `explained` does a class."""

    def decorate(function: F) -> F:
        known = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*arguments: Any, **given: Any) -> Any:
            try:
                answer = functools.partial(_answer, known=known, settings=settings, hints=None)
                _refuse_unknown(function.__name__, given, known, answer)
            except PacelineError as error:
                fold(error)
                raise
            return function(*arguments, **given)

        return cast(F, call)

    return decorate


def _refuse_unknown(where: str, given: Iterable[str], known: list[str], answer: Callable[[str], str]) -> None:
    for name in given:
        if name not in known:
            remedy = answer(name) or _nearest(name, known)
            raise ConfigError(f"{where} has no setting {name!r}", remedy=remedy, key=name)


def _answer(name: str, known: list[str], settings: type | None, hints: Mapping[str, str] | None) -> str:
    """Return the remedy for a name that is known elsewhere; empty for one that is not."""
    if hints is not None:
        own = [hints.get(one, "") for one in (name, _SETTING_OF.get(name, name), _TRAINER_OF.get(name, name))]
        alike = {*_SETTINGS.get(_SETTING_OF.get(name, name), ()), _SETTING_OF.get(name, "")}
        meant = [f"use {one}=..." for one in known if one in alike]
        return next(filter(None, [*own, *meant]), "")
    if settings is None:
        if name in _OF_TRAINER or name in _TRAINER_OF:
            return f"give it to the Trainer: paceline.Trainer({_TRAINER_OF.get(name, name)}=...)"
        right = _SETTING_OF.get(name, "")
        return _MEANINGS.get(name) or (f"use {right}=..." if right in known else "")
    if name in _TRAINER_OF:
        return f"use {_TRAINER_OF[name]}=..."
    right = _SETTING_OF.get(name, name)
    is_setting = right in {field.name for field in dataclasses.fields(settings)}
    if name in _MEANINGS:
        within = f", in config=paceline.{settings.__name__}(...)" if is_setting else ""
        return _MEANINGS[name] + within
    return (
        f"it belongs to the settings: config=paceline.{settings.__name__}({right}=...)" if is_setting else ""
    )


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]}? " if near else "") + f"there are {', '.join(known)}"
