"""Metrics for any number of consumers at their own pace, as asynchronous iterators.

A consumer gets every step from the moment it begins to listen. One that falls far behind loses the oldest,
never the newest, and nobody waits for it. Lives in one event loop. Must not know what the metrics are of.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import final

from paceline.frontends.orchestrator.nodes import TrainingMetrics

_MOST_WAITING = 65_536


@final
class Listener:
    """One consumer: what it has not seen yet."""

    def __init__(self) -> None:
        self.waiting: deque[TrainingMetrics] = deque(maxlen=_MOST_WAITING)
        self.news = asyncio.Event()
        self.over = False


@final
class Broadcast:
    """Hands metrics to whoever listens, until it ends."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        self._over = False

    def publish(self, metrics: TrainingMetrics) -> None:
        for listener in self._listeners:
            listener.waiting.append(metrics)
            listener.news.set()

    def end(self) -> None:
        """No more will come; consumers see what is left, and their loops end."""
        self._over = True
        for listener in self._listeners:
            listener.over = True
            listener.news.set()

    def subscribe(self) -> AsyncIterator[TrainingMetrics]:
        """From now on: listening begins with this call, not with the first `async for`."""
        listener = Listener()
        listener.over = self._over
        if not self._over:
            self._listeners.add(listener)
        return self._listen(listener)

    async def _listen(self, listener: Listener) -> AsyncIterator[TrainingMetrics]:
        try:
            while True:
                while listener.waiting:
                    yield listener.waiting.popleft()
                if listener.over:
                    return
                listener.news.clear()
                await listener.news.wait()
        finally:
            self._listeners.discard(listener)
