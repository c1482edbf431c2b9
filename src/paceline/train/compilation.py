"""torch.compile such that the kernels depend on the shape of a batch and on nothing else.

By itself the compiler times candidates and keeps the fastest, and it turns sizes that change into variables
once it has seen two of them: both depend on what else a process has run, and a worker sees its own shards
only. For exact runs the choice is made without timing, and each shape gets kernels of its own. Must not know
the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from paceline.core.errors import UsageError
from paceline.train.config import TrainConfig

# For each function that is compiled; with more the compiler would give up and run it as it is.
_MOST_SHAPES = 64


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
