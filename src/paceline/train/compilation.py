"""torch.compile such that the kernels depend on the shape of a batch and on nothing else.

By itself the compiler times candidates and keeps the fastest, and it turns sizes that change into variables
once it has seen two of them: both depend on what else a process has run, and a worker sees its own shards only.
For exact runs the choice is made without timing, and each shape gets kernels of its own. Must not know the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.train.config import TrainConfig

_MOST_SHAPES = 64
"""Beyond the compiler's limit it would quietly run uncompiled, with other bits."""


@contextmanager
def compiled(module: nn.Module, config: TrainConfig) -> Iterator[Callable[..., Any]]:
    """What to call instead of the module; the compiler's settings are as before afterwards."""
    if not config.compile:
        yield module
        return
    if config.mode != "exact":
        yield torch.compile(module)
        return
    # The compiler is large and only imported where it is used.
    import torch._dynamo.config as tracing
    import torch._inductor.config as kernels

    with tracing.patch(recompile_limit=_MOST_SHAPES), kernels.patch(deterministic=True):
        yield torch.compile(module, dynamic=False)
