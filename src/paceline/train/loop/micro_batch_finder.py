"""The largest micro-batch that fits into memory, found before the first step by trying.

Trials are real forward and backward passes of the user's objective on the first samples of the run, with as
much memory set aside as the sum of gradients and an optimizer's state will need. They leave no trace: random
generators, buffers, gradients and modes are as before. Samples that differ in size are tried as they come:
set a number where later ones are much longer.
"""

from __future__ import annotations

import gc
import logging
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError, ResourceError
from paceline.core.wording import counted
from paceline.data.orders import epoch_order
from paceline.data.seeding import seed_everything, set_aside
from paceline.data.sources import Request, Source, read
from paceline.train.objective import Objective
from paceline.train.precision import autocast
from paceline.train.settings.train_config import TrainConfig
from paceline.train.step.batch_feed import to_device
from paceline.train.step_info import first_step_of

_log = logging.getLogger(__name__)

_TRIAL = 0x5452  # marks keys of trials, apart from those of reading and computing
# The exchange's own copy of the gradient, and two moments: what most optimizers keep.
_COPIES_SET_ASIDE = 3
_OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out; libraries report it in several ways."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


def find(try_size: Callable[[int], None], largest: int) -> int:
    """Return the largest size from 1 to `largest` that `try_size` does not run out of memory with.

    Powers of two and `largest` first, so that little is wasted on what surely fits; then between the last
    that fitted and the first that did not. One alone is tried last: many models refuse it for other reasons
    (BatchNorm), and need it never be. Other errors come out as they are.
    """
    good, bad = 0, largest + 1
    for size in [*(1 << exponent for exponent in range(1, (largest - 1).bit_length())), largest]:
        if not _fits(try_size, size):
            bad = size
            break
        good = size
    good += bisect_left(range(good + 1, bad), True, key=lambda size: not _fits(try_size, size))
    if not good:
        raise ResourceError(
            'micro_batch="auto": not even one sample fits into memory',
            remedy='use a smaller model or shorter samples, precision="bf16", activation_checkpointing=True, '
            "or a device with more memory; see that nothing else uses this one",
        )
    return good


def find_for_run(
    config: TrainConfig,
    module: nn.Module,
    call: Callable[..., Any],
    objective: Objective,
    source: Source,
    device: torch.device,
    change_batch: Callable[[Any], Any] | None = None,
) -> int:
    """Return what fits for this run: `call` is the module as the loop calls it (compiled, say)."""
    largest = largest_size(config, source)
    order = epoch_order(source, seed=config.seed, epoch=0, batch=config.first_batch, shuffle=config.shuffle)
    first = first_step_of(config, source.size)
    reserve = _COPIES_SET_ASIDE * sum(p.nbytes for p in module.parameters() if p.requires_grad)

    def try_size(size: int) -> None:
        request = Request((config.seed, 0, 0, size, _TRIAL), order.take(0, size))
        try:
            with closing(read(source, [request])) as reader:
                batch = to_device(next(reader).data, device)
            # On a CPU memory that is never touched costs nothing.
            held = torch.empty(reserve if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
            seed_everything(config.seed, _TRIAL)
            for turn in range(len(config.optimizer_turns or (1,))):
                info = first.at(0, 0, None if config.optimizer_turns is None else turn)
                with autocast(config.precision, device):
                    given = change_batch(batch) if change_batch is not None else batch
                    scored = objective.score(call, given, info)
                scored.loss.backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            del held
        finally:
            for parameter in module.parameters():
                parameter.grad = None

    with _no_trace(module):
        size = find(try_size, largest)
    _empty_caches(device)
    fits = "fits" if size == 1 else "fit"
    _log.info("micro_batch: %s of %d %s into memory", counted(size, "sample"), largest, fits)
    return size


def largest_size(config: TrainConfig, source: Source) -> int:
    """Return the samples of the largest shard; there is never a larger micro-batch."""
    if source.size is None:
        raise ConfigError(
            'micro_batch="auto" with an iterable dataset: trying would consume samples',
            remedy="set micro_batch to a number, or leave it out",
            key="micro_batch",
        )
    batch = config.global_batch if config.dynamic_batch is None else config.dynamic_batch.max
    return max(1, min(-(-batch // config.chosen_shards), source.size))


def _fits(try_size: Callable[[int], None], size: int) -> bool:
    try:
        try_size(size)
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            error.add_note(f'while micro_batch="auto" tried a micro-batch of {size}')
            raise
        # The frames of the trial hold the tensors that did not leave room for more.
        traceback.clear_frames(error.__traceback__)
    # Not in the handler, which keeps the error and what it refers to.
    _empty_caches(None)
    return False


def _empty_caches(device: torch.device | None) -> None:
    gc.collect()
    if (device is None or device.type == "cuda") and torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _no_trace(module: nn.Module) -> Iterator[None]:
    modes = [(child, child.training) for child in module.modules()]
    # On the CPU: what is kept here must not be what is missing there.
    buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in module.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    with set_aside():
        try:
            yield
        finally:
            for child, training in modes:
                child.training = training
            for buffer, kept in buffers:
                buffer.data.copy_(kept)
            for parameter, gradient in gradients:
                parameter.grad = gradient
