"""Nodes on which no agent of a job shall be placed for a while, although Ray offers them. Pure."""

from __future__ import annotations

from typing import final

from paceline.core.clock import Clock


@final
class AvoidedNodes:
    """Nodes by Ray's own id, each until its time is over."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def avoid(self, node_id: str, seconds: float) -> None:
        """Avoid a node for at least that long from now on. An empty id, of an agent that was lost
        before its first report, names no node."""
        if node_id:
            self._until[node_id] = max(self._until.get(node_id, 0.0), self._clock.now() + seconds)

    def now(self) -> frozenset[str]:
        """Return the nodes to avoid now."""
        now = self._clock.now()
        return frozenset(node_id for node_id, until in self._until.items() if until > now)
