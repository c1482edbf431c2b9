"""Some ranks of a transport as a transport of their own, by messages. Only members may use it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from paceline.comm.calls import Call
from paceline.comm.transport.base import Message, Topology, Transport, Window
from paceline.comm.transport.pipeline import Pipeline, Renumbered


class Subset:
    def __init__(self, parent: Transport, ranks: Sequence[int]) -> None:
        self._parent = parent
        self._ranks = list(ranks)
        self.name = parent.name
        self.rank = self._ranks.index(parent.rank)
        self.world_size = len(self._ranks)
        hosts = [parent.topology.host_of[rank] for rank in self._ranks]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        self.topology = Topology(tuple(numbers[host] for host in hosts))
        self.traffic = parent.traffic
        self.window: Window | None = None

    def exchange(
        self,
        call: Call,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        deadline: float,
    ) -> None:
        ranks = self._ranks
        self._parent.exchange(
            call,
            [(ranks[peer], tensor) for peer, tensor in sends],
            [(ranks[peer], tensor) for peer, tensor in receives],
            deadline,
        )

    def pipeline(self, ranks: Sequence[int]) -> Pipeline | None:
        make = getattr(self._parent, "pipeline", None)
        found = None if make is None else make([self._ranks[rank] for rank in ranks])
        return None if found is None else Renumbered(found, self._ranks)

    def post(self, dest: int, tag: int, body: Sequence[memoryview], deadline: float) -> None:
        self._parent.post(self._ranks[dest], tag, body, deadline)

    def take(self, source: int, tag: int | None, deadline: float, *, own_deadline: bool) -> Message:
        message = self._parent.take(self._ranks[source], tag, deadline, own_deadline=own_deadline)
        return Message(self._ranks.index(message.source), message.tag, message.body)

    def empty(self, nbytes: int) -> Tensor:
        return self._parent.empty(nbytes)

    def close(self, error: BaseException | None = None) -> None:
        """The parent's life is its owner's business."""
