"""What this rank put into its latest steps, as short hashes: with them the first to differ is found when the
steps are computed again (elastic/trails.py).

Of each step: the shards of this rank, the sample of the weights that they were computed with (agreement.py),
and a hash of some chunks of what this rank gave to the sum, with its losses. A weight that differs changes
nearly all gradients that depend on it, so that a part of them shows it, and costs microseconds. Needed only
where the sample of one step is not of all weights. Must not know what follows from a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, final

import xxhash
from torch import Tensor

from paceline.train.agreement import host_bytes

CHUNKS: Final = 4
CHUNK_BYTES: Final = 4096


def contribution(tensors: Iterable[Tensor]) -> str:
    """Of flat tensors in this host's memory: some chunks of each, evenly spread. Not single numbers: after a
    backward pass none of them is in a cache, and each by itself would cost a fetch."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        flat = tensor.detach().contiguous()  # named, so that it outlives the view of its memory
        memory = host_bytes(flat)
        apart = len(memory) // CHUNKS
        if apart <= CHUNK_BYTES:
            digest.update(memory)
            continue
        for place in range(0, CHUNKS * apart, apart):
            digest.update(memory[place : place + CHUNK_BYTES])
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
