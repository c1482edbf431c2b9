"""Publish the metrics of every step to any number of consumers in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import final

from paceline.frontends.orchestrator.observed_state import TrainingMetrics

_MAX_UNREAD = 65_536  # metrics of a consumer; beyond it loses the oldest


@final
class MetricPublisher:
    """Publishes metrics to any number of consumers in one event loop; a slow consumer delays no other."""

    def __init__(self) -> None:
        self._consumers: list[asyncio.Queue[TrainingMetrics | None]] = []
        self._ended = False

    def publish(self, metrics: TrainingMetrics | None) -> None:
        """Publish one step; None: the last."""
        for unread in self._consumers:
            if metrics is not None and unread.qsize() >= _MAX_UNREAD:
                unread.get_nowait()
            unread.put_nowait(metrics)

    def end(self) -> None:
        """Let consumers read what is left; then their loops end."""
        self._ended = True
        self.publish(None)

    def subscribe(self) -> AsyncIterator[TrainingMetrics]:
        """Subscribe with this call, not with the first `async for`."""
        unread: asyncio.Queue[TrainingMetrics | None] = asyncio.Queue(_MAX_UNREAD + 1)
        if self._ended:
            unread.put_nowait(None)
        self._consumers.append(unread)
        return self._read(unread)

    async def _read(self, unread: asyncio.Queue[TrainingMetrics | None]) -> AsyncIterator[TrainingMetrics]:
        try:
            while (metrics := await unread.get()) is not None:
                yield metrics
        finally:
            self._consumers.remove(unread)
