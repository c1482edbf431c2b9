"""Prepare a process to compute a run's bits: device, threads, deterministic kernels, the compiler's settings;
and restore them afterwards.

`WorkerProcessTuning` (fp32 precision, kept memory) is for good, and only for processes that were started
for training, never for the caller's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from paceline.core.claims import claimed_gpu
from paceline.core.errors import UnavailableError, UsageError
from paceline.core.freed_memory import keep_freed_memory
from paceline.core.wording import with_article
from paceline.data.seeding import seed_everything
from paceline.train.settings.train_config import TrainConfig

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# For each function that is compiled; with more the compiler would give up and run it as it is.
_MOST_SHAPES = 64


def choose_device(config: TrainConfig, rank: int) -> torch.device:
    """Return the CPU, or this rank's GPU; ranks share GPUs when there are more ranks. Workers of runs that
    stand in one queue take GPUs that no other of them has."""
    wanted = config.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            'device="cuda", and torch finds no GPU here',
            remedy='use device="auto" or "cpu", or install a CUDA build of torch',
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    device = torch.device("cuda", claimed_gpu(count, rank % count))
    torch.cuda.set_device(device)
    return device


@contextmanager
def prepared(config: TrainConfig) -> Iterator[None]:
    """Set the thread count and, in exact mode, deterministic kernels; restore both on exit."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    if config.threads is not None and config.threads != threads:
        torch.set_num_threads(config.threads)
    if config.mode == "exact":
        # cuBLAS reads this when it is first used; kernels that cannot be deterministic raise and say so.
        os.environ.setdefault(_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        # Filling fresh memory finds reads of it, which is the kernels' tests' business, at a price.
        memory.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def build_model(model: nn.Module | Callable[[], nn.Module], seed: int) -> nn.Module:
    """Return the module, or what the function makes with randomness from the run's seed."""
    made: Any = model
    if not isinstance(model, nn.Module):
        seed_everything(seed)
        made = model()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"the model function returned {with_article(made)}", remedy="return a torch.nn.Module"
        )
    check_initialised(made)
    return made


def check_initialised(module: nn.Module) -> None:
    """Refuse lazy modules that do not know their sizes yet: optimizers and gradients need them."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"{', '.join(lazy[:5])}{' ...' if len(lazy) > 5 else ''} of the model {type(module).__name__} "
            "have no size yet",
            remedy="run one batch through the model before, or use modules that are built with their sizes",
        )


@contextmanager
def recomputing(module: nn.Module, which: bool | tuple[str, ...]) -> Iterator[None]:
    """Drop the activations of some submodules after forward and compute them again for backward.

    True takes the direct children of every ModuleList and Sequential; names are of module classes.
    """
    chosen = _blocks(module) if which is True else _named(module, which or ())
    for child in chosen:
        # An attribute of the object, which hides the method of its class for the time of the run.
        passes = partial(contexts_of_passes, child)
        child.forward = partial(checkpoint, child.forward, use_reentrant=False, context_fn=passes)
    try:
        yield
    finally:
        for child in chosen:
            del child.forward


def contexts_of_passes(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first pass and of the second. No closure: a user's code may pickle the model
    during a run."""
    return nullcontext(), _keeping_buffers(module)


@contextmanager
def _keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Restore buffers after the second pass, for backward: the first has counted the batch already."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, kept in before:
            # Through `data`, which autograd does not count as a change: a buffer may be saved for backward.
            buffer.data.copy_(kept)


def _blocks(module: nn.Module) -> list[nn.Module]:
    containers = [child for child in module.modules() if isinstance(child, nn.ModuleList | nn.Sequential)]
    inside = {id(container) for container in containers}
    blocks = {id(child): child for container in containers for child in container if id(child) not in inside}
    # The outermost only: what lies within a block is recomputed with it.
    within = {id(part) for block in blocks.values() for part in block.modules() if part is not block}
    blocks = {key: child for key, child in blocks.items() if key not in within}
    if not blocks:
        raise UsageError(
            "activation_checkpointing=True takes the members of ModuleList and Sequential, "
            f"and {type(module).__name__} has none",
            remedy='name the classes to recompute: activation_checkpointing=("Block",)',
        )
    return list(blocks.values())


def classes_of_blocks(module: nn.Module) -> tuple[str, ...]:
    """Return the classes of the members of ModuleLists and Sequentials that are made of further modules: a
    residual or a transformer block, and not a single layer."""
    names = {type(block).__name__ for block in _blocks(module) if any(block.children())}
    if not names:
        raise UsageError(
            f"no member of a ModuleList or Sequential of {type(module).__name__} is made of further modules: "
            "there are layers, and no blocks",
            remedy="recompute layers, or name the classes to recompute",
        )
    return tuple(sorted(names))


def _named(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    found = [child for child in module.modules() if type(child).__name__ in names]
    missing = set(names) - {type(child).__name__ for child in found}
    if missing:
        classes = sorted({type(child).__name__ for child in module.modules()})
        raise UsageError(
            f"activation_checkpointing names {', '.join(sorted(missing))}, which the model does not contain",
            remedy=f"choose from {', '.join(classes)}",
        )
    return found


@contextmanager
def compiled(module: nn.Module, config: TrainConfig) -> Iterator[Callable[..., Any]]:
    """Yield what to call instead of the module, compiled so that its kernels depend on the shape of a batch
    and on nothing else; restore the compiler's settings on exit.

    By itself the compiler times candidates and keeps the fastest, and it turns sizes that change into
    variables once it has seen two of them: both depend on what else a process has run, and a worker sees its
    own shards only. In exact mode the choice is made without timing, and each shape gets its own kernels.
    """
    if not config.compile:
        yield module
        return
    if config.mode != "exact":
        yield torch.compile(module)
        return
    # The compiler is large and only imported where it is used.
    import torch._dynamo.config as tracing
    import torch._inductor.config as kernels
    from torch._dynamo.exc import FailOnRecompileLimitHit

    # Beyond its limit the compiler would quietly run uncompiled, with other bits.
    strict = tracing.patch(recompile_limit=_MOST_SHAPES, fail_on_recompile_limit_hit=True)
    with strict, kernels.patch(deterministic=True):
        try:
            yield torch.compile(module, dynamic=False)
        except FailOnRecompileLimitHit as error:
            made = UsageError(
                f"the compiled model {type(module).__name__} met more than {_MOST_SHAPES} different shapes "
                "of batches, and an exact run compiles each by itself",
                remedy="pad the batches to a few sizes, or leave compile out",
            )
            for note in getattr(error, "__notes__", ()):
                made.add_note(note)
            raise made from error


@dataclass(frozen=True)
class WorkerProcessTuning:
    """The caller's settings that a worker takes over."""

    matmul_precision: str = "highest"

    @classmethod
    def like_this_one(cls) -> WorkerProcessTuning:
        return cls(torch.get_float32_matmul_precision())

    def apply(self) -> None:
        """Apply the tuning to this process; it is not undone."""
        torch.set_float32_matmul_precision(self.matmul_precision)
        keep_freed_memory()
