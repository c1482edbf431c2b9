"""What this rank put into its latest steps, as short hashes: with them the first to differ is found when the
steps are computed again (elastic/trails.py).

Of each step: the shards of this rank, the sample of the weights that they were computed with (agreement.py),
and a hash of some thousand numbers, evenly spread, of what this rank gave to the sum, with its losses. A
weight that differs changes nearly all gradients that depend on it, so that a part of them shows it; a part
costs microseconds. Needed only where the sample of one step is not of all weights. Must not know what follows
from a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

import torch
import xxhash
from torch import Tensor

MOST_NUMBERS: Final = 4096


def contribution(tensors: Iterable[Tensor]) -> str:
    """Of flat tensors in this host's memory: at most `MOST_NUMBERS` of each."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        # Odd, so that no structure of rows and cache lines is met by it again and again.
        some = flat[:: (flat.numel() // MOST_NUMBERS) | 1].contiguous()
        if some.numel():
            digest.update(some.view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


@final
class Trail:
    """Those of the latest steps: twice as many as it takes until every weight has been looked at."""

    def __init__(self, parts: int) -> None:
        self.needed = parts > 1
        self._most = 2 * parts
        self._kept: dict[int, str] = {}

    def add(self, step: int, shards: Sequence[int], sample: str, contributed: str) -> None:
        if not self.needed or not contributed:
            return
        which = xxhash.xxh3_64(repr(tuple(shards)).encode()).hexdigest()
        self._kept[step] = f"{which}/{sample}/{contributed}"
        while len(self._kept) > self._most:
            del self._kept[min(self._kept)]

    def clear(self) -> None:
        """The state is another one, which this rank has not come to by its own steps."""
        self._kept = {}

    @property
    def told(self) -> tuple[tuple[int, str], ...]:
        return tuple(sorted(self._kept.items()))
