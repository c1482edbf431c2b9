"""Steps that the chief of parameter servers has handed out to workers, and their figures, in order.

TensorFlow waits for figures also where no worker is left to make the step. They are fetched in another thread
here, so that the chief hears of such a loss while it waits.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, final

from paceline.core.errors import PeerLostError
from paceline.frontends.framework_trainers.server_ranks import ServedRanks


@final
class HandedOutSteps:
    """The steps that are under way: as many as `len` says."""

    def __init__(self, coordinator: Any, served: ServedRanks | None) -> None:
        self._coordinator = coordinator
        self._under_way = 0
        self._scheduled: SimpleQueue[Any] = SimpleQueue()
        self._fetched: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._fetch, name="paceline-handed-out", daemon=True)
        self._thread.start()
        if served is not None:
            served.tell_when_over(self._fail)

    def __len__(self) -> int:
        return self._under_way

    def hand_out(self, step: Any, *args: Any) -> None:
        """Have a worker that is free make a step, now or later."""
        self._scheduled.put(self._coordinator.schedule(step, args=args))
        self._under_way += 1

    def take(self) -> Any:
        """Return the figures of the oldest step, when they have come; PeerLostError where none will come."""
        figures, error = self._fetched.get()
        if error is not None:
            raise error
        self._under_way -= 1
        return figures

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scheduled.put(None)
        if error is None:
            self._thread.join()  # after an error it may wait for a worker that is gone

    def _fail(self, error: PeerLostError) -> None:
        self._fetched.put((None, error))

    def _fetch(self) -> None:
        while (value := self._scheduled.get()) is not None:
            try:
                self._fetched.put((value.fetch(), None))
            except BaseException as error:
                self._fetched.put((None, error))
