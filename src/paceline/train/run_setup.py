"""How a process is prepared to compute a run's bits: device, threads, deterministic kernels; and put back.

Must not know the loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from paceline.core.errors import UnavailableError, UsageError
from paceline.core.words import a_kind
from paceline.data.randomness import seed_everything
from paceline.train.config import TrainConfig

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def choose_device(config: TrainConfig, rank: int) -> torch.device:
    """The CPU, or this rank's GPU; ranks share GPUs when there are more ranks."""
    wanted = config.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            'device="cuda", and torch finds no GPU here',
            remedy='use device="auto" or "cpu", or install a CUDA build of torch',
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@contextmanager
def prepared(config: TrainConfig) -> Iterator[None]:
    """Threads and, for exact runs, deterministic kernels; as before afterwards."""
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
    """The module, or what the function makes with randomness from the run's seed."""
    made: Any = model
    if not isinstance(model, nn.Module):
        seed_everything(seed)
        made = model()
    if not isinstance(made, nn.Module):
        raise UsageError(f"the model function returned {a_kind(made)}", remedy="return a torch.nn.Module")
    check_initialised(made)
    return made


def check_initialised(module: nn.Module) -> None:
    """Lazy modules that do not know their sizes yet are refused: optimizers and gradients need them."""
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
    """Activations of some submodules are dropped after forward and computed again for backward.

    True takes the direct children of every ModuleList and Sequential; names are of module classes.
    """
    chosen = _blocks(module) if which is True else _named(module, which or ())
    for child in chosen:
        # An attribute of the object, which hides the method of its class for the time of the run.
        child.forward = partial(
            checkpoint,
            child.forward,
            use_reentrant=False,
            context_fn=partial(_first_and_second_pass, child),
        )
    try:
        yield
    finally:
        for child in chosen:
            del child.forward


def _first_and_second_pass(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _keeping_buffers(module)


@contextmanager
def _keeping_buffers(module: nn.Module) -> Iterator[None]:
    """Statistics have counted the batch in the first pass; the second, for backward, changes nothing."""
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
    found = {id(child): child for container in containers for child in container if id(child) not in inside}
    # The outermost only: what lies within a block is recomputed with it.
    within = {id(part) for block in found.values() for part in block.modules() if part is not block}
    found = {key: child for key, child in found.items() if key not in within}
    if not found:
        raise UsageError(
            "activation_checkpointing=True takes the members of ModuleList and Sequential, "
            f"and {type(module).__name__} has none",
            remedy='name the classes to recompute: activation_checkpointing=("Block",)',
        )
    return list(found.values())


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
