"""What communication cost: per operation and algorithm, calls, messages, bytes, seconds. Counting only, no
printing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Tally:
    """Sums over the calls of one operation with one algorithm. Bytes are payload as it travelled, after
    compression; headers apart."""

    calls: int = 0
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    header_bytes: int = 0
    bytes_between_hosts: int = 0
    rounds: int = 0
    seconds: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Effective bytes per second: what left and what came, over the time it took."""
        return (self.bytes_sent + self.bytes_received) / self.seconds if self.seconds > 0 else 0.0

    def add(self, before: tuple[int, ...], after: tuple[int, ...], seconds: float) -> None:
        messages, sent, received, headers, between, rounds = (
            new - old for new, old in zip(after, before, strict=True)
        )
        self.calls += 1
        self.messages += messages
        self.bytes_sent += sent
        self.bytes_received += received
        self.header_bytes += headers
        self.bytes_between_hosts += between
        self.rounds += rounds
        self.seconds += seconds

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bandwidth": self.bandwidth}


class CommunicationStats:
    """Tallies by (operation, algorithm), and their sum."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], Tally] = {}

    def record(
        self, operation: str, algorithm: str, before: tuple[int, ...], after: tuple[int, ...], seconds: float
    ) -> None:
        key = operation, algorithm
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally()
        tally.add(before, after, seconds)

    def to_dict(self) -> dict[str, Any]:
        """{"total": {...}, "operations": {"all_reduce": {"ring": {...}}, ...}}"""
        operations: dict[str, dict[str, Any]] = {}
        total = Tally()
        for (operation, algorithm), tally in sorted(self._tallies.items()):
            operations.setdefault(operation, {})[algorithm or "-"] = tally.to_dict()
            for name in Tally.__slots__:
                setattr(total, name, getattr(total, name) + getattr(tally, name))
        return {"total": total.to_dict(), "operations": operations}

    def clear(self) -> None:
        self._tallies.clear()
