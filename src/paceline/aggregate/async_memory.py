"""The memory that server and one worker share: the model's state one way, a gradient the other way.

One memory file per worker, laid out alike on both sides from names, dtypes and shapes. They take turns, told
by messages, so there is nothing to lock. Must not know who is on the other side, nor what is learned.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

_ALIGN = 64


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once; not copied."""
    found: dict[str, Tensor] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    found.update({name: buffer.detach() for name, buffer in module.named_buffers()})
    return found


@final
class SharedMemory:
    """`state` and `gradients` by name, as tensors in the memory file."""

    def __init__(self, descriptor: int, state: Mapping[str, Tensor], trained: Sequence[str]) -> None:
        places: list[tuple[Tensor, int]] = []
        size = 0
        for like in [*state.values(), *(state[name] for name in trained)]:
            places.append((like, size))
            size += -(-like.numel() * like.element_size() // _ALIGN) * _ALIGN
        size = max(size, _ALIGN)
        # Both sides know the size, and whoever comes first makes it so.
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        tensors = [_tensor(memory, like, offset) for like, offset in places]
        self.state = dict(zip(state, tensors[: len(state)], strict=True))
        self.gradients = dict(zip(trained, tensors[len(state) :], strict=True))


def _tensor(memory: mmap.mmap, like: Tensor, offset: int) -> Tensor:
    count = math.prod(like.shape)
    if count == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(memory, dtype=like.dtype, count=count, offset=offset).reshape(like.shape)


@torch.no_grad()
def copy_all(into: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copies by name; both have the same names."""
    for name, target in into.items():
        target.copy_(source[name])
