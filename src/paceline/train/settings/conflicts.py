"""Settings that are each valid and do not go together: refused before a worker starts, arithmetic shown.

One function per rule, in the order in which a reader of the settings meets them; the first that fails is
raised.
"""

from __future__ import annotations

from typing import NoReturn

from paceline.core.errors import ConfigError
from paceline.core.untrusted import redact_credentials
from paceline.core.wording import counted
from paceline.train.settings.run_length import told
from paceline.train.settings.schedule import run_length, steps_of_epoch, steps_per_epoch, total_steps
from paceline.train.settings.train_config import GradientCompression, LossScaling, TrainConfig

# More shards than this cannot make slices smaller, only more numerous: surely a mistake.
_MOST_SAMPLES = 1 << 24
_MOST_SHARDS = 1 << 16
_USUAL_BATCH = TrainConfig().global_batch  # the same as one that was left out


def check(config: TrainConfig, *, samples: int | None, validation: bool = True) -> None:
    """Refuse combinations that cannot work, for data of `samples` samples (None: an iterable dataset).

    `validation`: whether there is data to evaluate on.
    """
    _workers_and_shards(config)
    _global_batch(config)
    _data(config, samples)
    _micro_batch(config)
    _precision(config)
    _dynamic_batch(config, samples)
    _schedule(config, samples)
    _warmup(config, samples)
    _unfreeze(config, samples)
    _limits(config, validation)
    _compression(config)
    _optimizer_turns(config)
    _algorithm(config)
    _checkpoints(config)
    _nonfinite(config)
    _validation(config, validation)


def shard_sizes(global_batch: int, shards: int) -> str:
    """Return how many samples the slices of a full batch hold, in words."""
    low, high = global_batch // shards, -(-global_batch // shards)
    return counted(low, "sample") if low == high else f"{low} or {counted(high, 'sample')}"


def _refuse(message: str, remedy: str) -> NoReturn:
    raise ConfigError(message, remedy=remedy)


def _nonfinite(config: TrainConfig) -> None:
    if config.nonfinite != "warn" and config.mode == "fast":
        _refuse(
            f'nonfinite="{config.nonfinite}" for mode="fast", where each worker knows its own loss only: '
            f"some would {config.nonfinite}, and others apply the step",
            'use mode="exact", or a modifier that stops',
        )


def _workers_and_shards(config: TrainConfig) -> None:
    shards = config.chosen_shards
    if config.workers > shards:
        idle = config.workers - shards
        _refuse(
            f"workers={config.workers} for shards={shards}: a shard is computed by one worker, so "
            f"{config.workers} - {shards} = {idle} of them would have nothing to do",
            f"set workers to {shards} or fewer, or start the run with shards={config.workers} or more",
        )
    joining = config.fault_tolerance.joining_workers
    if joining > config.workers:
        _refuse(
            f"fault_tolerance.joining_workers={joining} for workers={config.workers}: they are some of these",
            f"set workers to all of them, {joining} or more",
        )
    least = config.fault_tolerance.min_workers
    if config.fault_tolerance.enabled and least > config.workers:
        _refuse(
            f"fault_tolerance.min_workers={least} for workers={config.workers}: the run would stop before it "
            "begins, for having too few of them",
            f"set min_workers to {config.workers} or fewer, or workers to {least} or more",
        )
    grown = config.fault_tolerance.max_workers
    if grown is not None and grown < config.workers:
        _refuse(
            f"fault_tolerance.max_workers={grown} for workers={config.workers}: the run would begin with "
            "more workers than it may have",
            f"set max_workers to {config.workers} or more, or workers to {grown} or fewer",
        )
    if grown is not None and config.mode == "exact" and grown > shards:
        _refuse(
            f"fault_tolerance.max_workers={grown} for shards={shards}: a shard is computed by one worker, so "
            "the run could never have that many",
            f"set max_workers to {shards} or fewer, or start the run with shards={grown} or more",
        )
    if config.mode == "fast" and shards != config.workers:
        _refuse(
            f'mode="fast" with workers={config.workers} and shards={shards}: there each worker is one slice '
            "of the batch",
            f'leave shards out, or use mode="exact", which assigns {shards} shards to any number of workers',
        )
    if shards > _MOST_SHARDS:
        _refuse(
            f"shards={shards} is more than {_MOST_SHARDS}",
            "choose a small multiple of the most workers that will ever run",
        )


def _global_batch(config: TrainConfig) -> None:
    shards = config.chosen_shards
    if config.dynamic_batch is None and config.global_batch < shards:
        _refuse(
            f"global_batch={config.global_batch} over shards={shards}: "
            f"{shards - config.global_batch} of the {shards} shards would never hold a sample",
            f"set global_batch to {shards} or more, or shards to {config.global_batch} or fewer",
        )
    largest = config.global_batch if config.dynamic_batch is None else config.dynamic_batch.max
    if largest > _MOST_SAMPLES:
        _refuse(
            f"a global batch of {largest} samples: the samples of a step are counted in fp32, which holds "
            f"whole numbers up to 2**24 = {_MOST_SAMPLES}",
            f"set it to {_MOST_SAMPLES} or less",
        )


def _data(config: TrainConfig, samples: int | None) -> None:
    if samples is None:
        return
    if samples == 0:
        _refuse("the training data holds 0 samples", "give data with at least one sample")
    batch = config.global_batch if config.dynamic_batch is None else config.dynamic_batch.max
    if config.drop_last and steps_per_epoch(samples, batch, drop_last=True) == 0:
        name = "global_batch" if config.dynamic_batch is None else "dynamic_batch.max"
        _refuse(
            f"{counted(samples, 'sample')} // {name}={batch} = 0 steps per epoch, because drop_last=True "
            "drops the last, short batch and there is no other",
            f"set drop_last=False, or {name} to {samples} or fewer",
        )


def _micro_batch(config: TrainConfig) -> None:
    if not isinstance(config.micro_batch, int):
        return
    shards = config.chosen_shards
    name, batch = "global_batch", config.global_batch
    if config.dynamic_batch is not None:
        name, batch = "dynamic_batch.max", config.dynamic_batch.max
    if config.micro_batch > -(-batch // shards):
        _refuse(
            f"{name}={batch} over shards={shards} with micro_batch={config.micro_batch}: a shard holds "
            f"{shard_sizes(batch, shards)}, so there would never be a micro batch of {config.micro_batch}",
            f"leave micro_batch out, or set it to {-(-batch // shards)} or fewer",
        )


def _precision(config: TrainConfig) -> None:
    if config.precision != "fp16" and config.loss_scaling != LossScaling():
        _refuse(
            f'loss_scaling is set and precision="{config.precision}": only fp16 has so small a range that '
            "the loss is scaled",
            'leave loss_scaling out, or set precision="fp16"',
        )


def _warmup(config: TrainConfig, samples: int | None) -> None:
    total = total_steps(config, samples)
    if total is not None and config.warmup_steps >= total:
        _refuse(
            f"warmup_steps={config.warmup_steps} of {_total_shown(config, samples, total)}: the run would "
            "end before the learning rate is reached",
            f"set warmup_steps below {total}",
        )


def _unfreeze(config: TrainConfig, samples: int | None) -> None:
    total = total_steps(config, samples)
    for prefix, steps in config.unfreeze.items():
        if total is not None and steps >= total:
            _refuse(
                f"unfreeze={{{prefix!r}: {steps}}} of {_total_shown(config, samples, total)}: the run would "
                "end before these parameters learn",
                f"set it below {total}, or freeze them with requires_grad_(False) and leave unfreeze out",
            )


def _limits(config: TrainConfig, validation: bool) -> None:
    if config.limit_batches is not None and config.dynamic_batch is not None:
        _refuse(
            f"limit_batches={config.limit_batches} with dynamic_batch: how many samples these are would "
            "depend on how the batch grows",
            "set max_steps, or leave one of the two out",
        )
    if config.limit_validation is not None and not validation:
        _refuse(
            f"limit_validation={config.limit_validation}, and there is no validation data",
            "give fit(train, val) validation data, or leave limit_validation out",
        )


def _schedule(config: TrainConfig, samples: int | None) -> None:
    if not isinstance(config.schedule, str):
        told(config.schedule, run_length(config, samples), "schedule")
    if config.schedule not in ("linear", "cosine") or total_steps(config, samples) is not None:
        return
    epochs = config.epochs or 1
    if config.dynamic_batch is not None and samples is not None:
        low, high = config.dynamic_batch.min, config.dynamic_batch.max
        most = epochs * steps_per_epoch(samples, low, drop_last=config.drop_last)
        least = epochs * steps_per_epoch(samples, high, drop_last=config.drop_last)
        steps = counted(most, "step") if least == most else f"{least} to {counted(most, 'step')}"
        why = (
            f"epochs={epochs} x {counted(samples, 'sample')} are {steps}, because dynamic_batch grows from "
            f"{low} to {high} with the noise"
        )
    else:
        why = f"epochs={epochs} of an iterable dataset are an unknown number of steps"
    _refuse(
        f'schedule="{config.schedule}" goes down to the end of the run, and the end is not known: {why}',
        'set max_steps, or use schedule="constant" or a function of the step',
    )


def _dynamic_batch(config: TrainConfig, samples: int | None) -> None:
    dynamic = config.dynamic_batch
    if dynamic is None:
        return
    shards = config.chosen_shards
    if config.mode == "fast":
        _refuse(
            'dynamic_batch with mode="fast": the noise is measured between the gradients of shards, and '
            "there only their sum is ever seen",
            'use mode="exact"',
        )
    if shards < 2:
        _refuse(
            f"dynamic_batch with shards={shards}: the noise is the spread of the shards' gradients, "
            f"divided by shards - 1 = {shards - 1}",
            "set shards to 2 or more; with workers=1 that costs nothing but smaller slices",
        )
    if dynamic.min < shards:
        _refuse(
            f"dynamic_batch.min={dynamic.min} over shards={shards}: a shard holds "
            f"{shard_sizes(dynamic.min, shards)}, and one without samples has no gradient to measure",
            f"set min to {shards} or more, or shards to {dynamic.min} or fewer",
        )
    if config.global_batch not in (_USUAL_BATCH, dynamic.min):
        _refuse(
            f"global_batch={config.global_batch} next to dynamic_batch: the batch goes from "
            f"dynamic_batch.min={dynamic.min} to dynamic_batch.max={dynamic.max}, and global_batch would "
            "mean nothing",
            "leave global_batch out; the learning rate is meant for dynamic_batch.min",
        )
    if samples is not None and dynamic.min > samples:
        _refuse(
            f"dynamic_batch.min={dynamic.min} and {counted(samples, 'sample')}: the first batch would be the "
            "whole data",
            f"set min to {samples} or fewer",
        )


def _compression(config: TrainConfig) -> None:
    compression = config.compression
    if compression is None:
        return
    default = GradientCompression(kind=compression.kind)
    if compression.kind != "top-k" and compression.keep != default.keep:
        _refuse(
            f'compression.keep={compression.keep} with kind="{compression.kind}", which sends every element',
            'leave keep out, or set kind="top-k"',
        )
    if compression.kind == "top-k" and not compression.error_feedback:
        _refuse(
            f"top-k with keep={compression.keep} and error_feedback=False: 1 - keep = "
            f"{1 - compression.keep:.1%} of every gradient would be lost for good",
            "leave error_feedback on",
        )
    if config.mode == "fast" and compression.error_feedback:
        _refuse(
            'compression with error_feedback=True and mode="fast": what could not be sent is kept by shard, '
            "and there a worker is no shard, so it would be lost with every change of the number of workers",
            'set error_feedback=False, or use mode="exact"',
        )


def _optimizer_turns(config: TrainConfig) -> None:
    if config.optimizer_turns is None:
        return
    if config.compression is not None and config.compression.error_feedback:
        _refuse(
            f"optimizer_turns={config.optimizer_turns} with compression and error_feedback=True: what could "
            "not be sent in a turn would be sent, and lost, in the turn of another optimizer",
            "set compression.error_feedback=False, or leave compression out",
        )
    if config.dynamic_batch is not None:
        _refuse(
            f"optimizer_turns={config.optimizer_turns} with dynamic_batch: the noise is measured over "
            "steps, and here the steps have different losses",
            "leave dynamic_batch out, and set global_batch",
        )


def _algorithm(config: TrainConfig) -> None:
    if config.algorithm != "auto" and (config.mode == "exact" or config.compression is not None):
        why = 'mode="exact"' if config.mode == "exact" else "compression"
        _refuse(
            f'algorithm="{config.algorithm}" with {why}, which sums in its own way',
            'leave algorithm out, or use mode="fast" without compression',
        )


def _checkpoints(config: TrainConfig) -> None:
    checkpoint = config.checkpoint
    never = checkpoint.every_steps is None and checkpoint.epochs_between is None and not checkpoint.at_end
    if checkpoint.enabled and never:
        _refuse(
            "checkpoint: enabled=True, but every_steps=None, every_epochs=None, at_end=False never write one",
            "set one of the three, or enabled=False",
        )
    if checkpoint.enabled and checkpoint.url is not None and config.run_dir is False:
        _refuse(
            f"checkpoint.url={redact_credentials(checkpoint.url)!r} with run_dir=False: versions would stay "
            "behind of a run that keeps nothing",
            "leave checkpoint.url out, or give the run a folder",
        )
    if not checkpoint.enabled and config.resume is not None:
        _refuse(
            f"resume={config.resume!r} with checkpoint.enabled=False: there is no place to resume from",
            "leave checkpoints enabled, or resume out",
        )


def _validation(config: TrainConfig, validation: bool) -> None:
    if config.early_stopping is not None and not validation:
        _refuse(
            f"early_stopping watches {config.early_stopping.metric!r} on validation data, and there is none",
            "give fit(train, val) validation data, or leave early_stopping out",
        )
    if config.evaluate_every is not None and not validation:
        _refuse(
            f"evaluate_every={counted(config.evaluate_every, 'step')}, and there is no validation data",
            "give fit(train, val) validation data, or leave evaluate_every out",
        )


def _total_shown(config: TrainConfig, samples: int | None, total: int) -> str:
    if samples is None or config.dynamic_batch is not None or total == config.max_steps:
        return f"max_steps={total}"
    epochs = config.epochs or 1
    steps = steps_of_epoch(config, samples)
    return (
        f"{counted(total, 'step')} (epochs={epochs} x {counted(steps, 'step')}, {counted(samples, 'sample')} "
        f"by global_batch={config.global_batch})"
    )
