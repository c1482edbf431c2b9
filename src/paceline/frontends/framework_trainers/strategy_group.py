"""Small messages between the workers of a tf.distribute strategy, over its own collectives.

Nothing but sums is asked of the strategy: a message is a row of numbers to which all other workers add
zeros, so that every worker gets the same bytes.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UsageError
from paceline.frontends.framework_trainers.framework_run import FrameworkWorker

_NAME_BYTES = 256


@final
class StrategyGroup:
    """The workers of a strategy that trains in step; one of them alone for a strategy of one process."""

    def __init__(self, tf: Any, strategy: Any, rank: int, size: int) -> None:
        self._tf, self._strategy = tf, strategy
        self.rank, self.size = rank, size

    @property
    def is_chief(self) -> bool:
        return self.rank == 0

    def broadcast(self, payload: bytes = b"") -> bytes:
        """Return the chief's bytes on every worker."""
        if self.size == 1:
            return payload
        mine = payload if self.is_chief else b""
        length = int(self._sum(np.array([len(mine)], np.int64))[0])
        padded = np.zeros(-(-length // 4), np.int32)
        if self.is_chief and length:
            raw = np.frombuffer(mine.ljust(padded.nbytes, b"\0"), np.int32)
            padded[:] = raw
        return self._sum(padded).tobytes()[:length]

    def broadcast_plain(self, data: Any) -> Any:
        """Return the chief's plain data on every worker."""
        return json.loads(self.broadcast(json.dumps(data).encode() if self.is_chief else b""))

    def processes(self) -> tuple[FrameworkWorker, ...]:
        """Return every worker's process, on all of them."""
        name = socket.gethostname().encode()[: _NAME_BYTES - 4]
        rows = np.zeros((self.size, _NAME_BYTES // 4), np.int32)
        row = np.array([os.getpid()], np.int32).tobytes() + name
        rows[self.rank] = np.frombuffer(row.ljust(_NAME_BYTES, b"\0"), np.int32)
        every = self._sum(rows)
        return tuple(
            FrameworkWorker(rank, int(one[0]), one[1:].tobytes().rstrip(b"\0").decode())
            for rank, one in enumerate(every)
        )

    def agree(self, numbers: Mapping[str, int | None]) -> None:
        """Refuse workers whose numbers differ, on all of them: their collectives would not match. Every
        worker has the same names; no number is negative."""
        rows = np.zeros((self.size, len(numbers)), np.int64)
        rows[self.rank] = [-1 if one is None else one for one in numbers.values()]
        every = self._sum(rows).tolist()
        for place, what in enumerate(numbers):
            for rank, row in enumerate(every):
                first, here = (None if found[place] < 0 else found[place] for found in (every[0], row))
                if here != first:
                    raise UsageError(
                        f"{what} is {first} on worker 0 and {here} on worker {rank}: every worker must make "
                        "the same steps",
                        remedy="give all workers the same model and settings, validation data to all of them "
                        "or to none, and datasets of the same length",
                    )

    def _sum(self, mine: NDArray[Any]) -> NDArray[Any]:
        if self.size == 1:
            return mine
        tf, strategy = self._tf, self._strategy
        nothing, first = np.zeros_like(mine), [True]

        def value(context: Any) -> Any:
            # One of this worker's replicas speaks for it.
            own = mine if first[0] else nothing
            first[0] = False
            return tf.constant(own)

        def total(part: Any) -> Any:
            same = strategy.run(tf.identity, args=(part,))
            return strategy.reduce(tf.distribute.ReduceOp.SUM, same, axis=None)

        parts = strategy.experimental_distribute_values_from_function(value)
        whole: NDArray[Any] = tf.function(total)(parts).numpy()
        return whole
