"""`paceline.memory_pool_scope`: a loop of the user's own reuses the memory that its steps free, as workers
do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline.core.freed_memory import kept_freed_memory


@contextmanager
def memory_pool_scope() -> Iterator[None]:
    """Reuse memory that is freed inside the block instead of returning it, so that every step gets what the
    last one has freed; after the block it is returned.

    On a CPU this concerns the whole process. On a GPU, what this thread allocates inside the block comes
    from a separate pool. Numbers do not depend on it.
    """
    pool: Any = nullcontext()
    if torch.cuda.is_available():
        pool = torch.cuda.use_mem_pool(torch.cuda.MemPool())
    with kept_freed_memory(), pool:
        yield
