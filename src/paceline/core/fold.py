"""Folds lines that several ranks repeat into one: `[ranks 0-3] message`.

Pure: time is an argument, lines go in and come out, each rank's lines stay in their order. Must not know
where lines come from or go to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, final

L = TypeVar("L", bound=Hashable)


@dataclass(frozen=True)
class Folded(Generic[L]):
    """One line, the ranks that said it, and when the first of them did."""

    line: L
    ranks: tuple[int, ...]
    first: float

    def __str__(self) -> str:
        return f"[{format_ranks(self.ranks)}] {self.line}"


@dataclass
class _Group(Generic[L]):
    number: int
    line: L
    first: float
    ranks: set[int] = field(default_factory=set)

    def folded(self) -> Folded[L]:
        return Folded(self.line, tuple(sorted(self.ranks)), self.first)


@final
class Folder(Generic[L]):
    """Holds a line up to `window` seconds for other ranks to say it too; less when all `world_size` have."""

    def __init__(
        self, *, window: float = 0.2, world_size: int | None = None, max_pending: int = 10_000
    ) -> None:
        self._window = window
        self._world_size = world_size
        self._max_pending = max_pending
        self._queue: deque[_Group[L]] = deque()
        self._by_line: dict[L, deque[_Group[L]]] = {}
        # The number of the newest group that a rank is in: a rank's next line may only join a later one,
        # else its lines would change places.
        self._newest: dict[int, int] = {}
        self._count = 0

    @property
    def pending(self) -> int:
        """How many lines are held back."""
        return len(self._queue)

    @property
    def deadline(self) -> float | None:
        """When `poll` will next have something to say."""
        return self._queue[0].first + self._window if self._queue else None

    def feed(self, rank: int, line: L, now: float) -> list[Folded[L]]:
        """Take one line of one rank; returns what can be written now."""
        after = self._newest.get(rank, -1)
        same = self._by_line.setdefault(line, deque())
        group = next((group for group in same if group.number > after), None)
        # Too old to join, although nobody has polled yet.
        if group is None or now >= group.first + self._window:
            group = _Group(self._count, line, now)
            self._count += 1
            self._queue.append(group)
            same.append(group)
        group.ranks.add(rank)
        self._newest[rank] = group.number
        return self.poll(now)

    def poll(self, now: float) -> list[Folded[L]]:
        """What has waited long enough, or need not wait any longer."""
        out: list[Folded[L]] = []
        while self._queue and self._is_done(self._queue[0], now):
            out.append(self._pop())
        return out

    def flush(self) -> list[Folded[L]]:
        """Everything that is held back."""
        return [self._pop() for _ in range(len(self._queue))]

    def _is_done(self, group: _Group[L], now: float) -> bool:
        return (
            now >= group.first + self._window
            or len(group.ranks) == self._world_size
            or len(self._queue) > self._max_pending
        )

    def _pop(self) -> Folded[L]:
        group = self._queue.popleft()
        same = self._by_line[group.line]
        same.popleft()
        if not same:
            del self._by_line[group.line]
        return group.folded()


def format_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3`, `ranks 0-2,5`."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    single = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank {text}" if single else f"ranks {text}"
