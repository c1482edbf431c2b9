"""How the contributions of all shards become one sum on every rank: one way per class, all of one shape.

    start()                            a step begins; what an abandoned one left is forgotten
    deposit(shard, gradients, tail)    a shard that this rank has computed
    finish(ballot, holdings)           the sum of all shards and of all ranks' ballots; `holdings` says whose
                                       shards count, where that is not simply what the team has dealt
    rebind()                           the team has a new group; what was deposited stays

Where members come and go, a `finish` that fails because somebody did not come leaves what was deposited as it
was (`keeps`): it can be finished with another group. Only where somebody is lost in the middle of the
exchange itself has the sum been written over it. Canonical: the fixed tree over the shards, the same bits for
any number of ranks. Plain: the fastest all-reduce, one contribution per rank (mode="fast"). Compressed sums
are in compressed_summation.py. Must not know what gradients are used for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from paceline.aggregate.strategy import Aggregation
from paceline.comm.algorithms.work import UNTOUCHED
from paceline.comm.compression.base import Compression
from paceline.comm.shards import Holdings
from paceline.core.errors import PacelineError
from paceline.train.gradients import Flat, Layout
from paceline.train.shard_fold import ShardFold
from paceline.train.team import Team
from paceline.train.trail import contribution


class Summation(Protocol):
    keeps: bool  # whether shards stay held when the exchange fails
    watched: bool  # whether what this rank gives to the sum is hashed
    contributed: str  # that hash, of the step that was finished last; empty where it says nothing

    def start(self) -> None: ...

    def deposit(self, shard: int, gradients: Sequence[Tensor | None], tail: Tensor) -> None: ...

    def finish(self, ballot: Tensor, holdings: Holdings | None = None) -> Flat: ...

    def rebind(self) -> None: ...


def flat_maker(team: Team, layout: Layout, device: torch.device) -> Flat:
    """Gradients on the CPU of several ranks lie where the peers reach them."""

    def memory(size: int, dtype: torch.dtype, where: torch.device) -> Tensor:
        if where.type == "cpu" and team.world_size > 1:
            return team.context.empty(size, dtype=dtype)
        return torch.empty(size, dtype=dtype, device=where)

    return Flat(layout, memory, device)


@final
class Staging:
    """Gradients of a GPU travel through the host's memory; on the CPU they are where they have to be."""

    def __init__(self, team: Team, layout: Layout, device: torch.device) -> None:
        self._team, self._layout = team, layout
        self.needed = device.type != "cpu"
        self._host: list[Flat] = []

    def out(self, flats: Sequence[Flat]) -> list[Flat]:
        if not self.needed:
            return list(flats)
        while len(self._host) < len(flats):
            self._host.append(flat_maker(self._team, self._layout, torch.device("cpu")))
        for host, flat in zip(self._host, flats, strict=False):
            host.copy_flat(flat)
        return self._host[: len(flats)]

    def back(self, host: Flat, flat: Flat) -> Flat:
        if host is not flat:
            flat.copy_flat(host)
        return flat

    def rebind(self) -> None:
        self._host = []


@dataclass(frozen=True)
class Checks:
    """Checksums of gradients: always, never, or (None) where they travel between hosts. `tamper` is called
    with this rank's gradients when they are taken: fault injection."""

    checksums: bool | None = False
    tamper: Callable[[Flat], None] | None = None


@final
class CanonicalSummation:
    def __init__(
        self,
        team: Team,
        layout: Layout,
        device: torch.device,
        checks: Checks,
    ) -> None:
        self._team = team
        self._fold = ShardFold(lambda: flat_maker(team, layout, device))
        self._staging = Staging(team, layout, device)
        self._checks = checks
        self.keeps = True
        self.watched, self.contributed = False, ""

    def start(self) -> None:
        # Kept apart, shards of several ranks are the same, and which of them count is not known before the
        # exchange. Of the group that computed them, not of the one that asks: it may be another by then.
        self.keeps = not self._team.backup
        self._fold.start(self._team.shards, apart=self._team.backup)

    def deposit(self, shard: int, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        self._fold.deposit(shard, gradients, tail)

    def finish(self, ballot: Tensor, holdings: Holdings | None = None) -> Flat:
        if holdings is not None:
            self._fold.keep_only(holdings.blocks[self._team.rank])
        mine = self._fold.partials
        if self._team.world_size == 1:
            mine[0].ballot.copy_(ballot)
            return mine[0]
        target = mine[0] if mine else self._fold.spare()
        partials = self._staging.out(mine)
        result = partials[0] if partials else self._staging.out([target])[0]
        if self.watched:
            # In the host's memory, where it is on its way: a GPU is not waited for once more.
            self.contributed = contribution(part for partial in partials for part in partial.given)
        for position, partial in enumerate(partials):
            partial.ballot.copy_(ballot if position == 0 else torch.zeros_like(ballot))
        context, holdings = self._team.context, holdings or self._team.holdings
        sealed = self._seals()
        for number, (dtype, out) in enumerate(result.memory.items()):
            try:
                context.fold_partials(
                    [partial.memory[dtype] for partial in partials],
                    holdings,
                    out,
                    checksum=sealed,
                    after_checksum=self._tampering(partials, dtype) if sealed else None,
                )
            except PacelineError as error:
                # Of a GPU's gradients it is the copies in the host's memory that were written over.
                untouched = self._staging.needed or (number == 0 and UNTOUCHED in error.facts)
                self.keeps = self.keeps and untouched
                raise
        return self._staging.back(result, target)

    def _seals(self) -> bool:
        """Checksums of gradients: where they travel, or everywhere where that is asked for."""
        if self._checks.checksums is None:
            return self._team.context.transport.topology.hosts > 1
        return self._checks.checksums

    def _tampering(self, partials: Sequence[Flat], dtype: torch.dtype) -> Callable[[], None] | None:
        tamper = self._checks.tamper
        if tamper is None or not partials or dtype != torch.float32:
            return None
        return lambda: tamper(partials[0])

    def rebind(self) -> None:
        self._fold.move()
        self._staging.rebind()


@final
class PlainSummation:
    """One contribution per rank, summed in whatever order is fastest, or by the algorithm that is named. Two
    sums of the same need not be the same, so computing a step again tells nothing of who was right."""

    keeps = watched = False
    contributed = ""

    def __init__(
        self,
        team: Team,
        layout: Layout,
        device: torch.device,
        compression: Compression | None = None,
        algorithm: str = "auto",
        aggregation: Aggregation | None = None,
    ) -> None:
        self._team = team
        self._layout = layout
        self._device = device
        self._compression = compression
        self._algorithm = algorithm
        self._aggregation = aggregation
        self._flat = flat_maker(team, layout, device)
        self._staging = Staging(team, layout, device)

    def start(self) -> None:
        if self._compression is not None:
            # A codec may have written a NaN of an earlier step between the gradients.
            self._flat.clear()

    def deposit(self, shard: int, gradients: Sequence[Tensor | None], tail: Tensor) -> None:
        self._flat.store(gradients, tail)

    def finish(self, ballot: Tensor, holdings: Holdings | None = None) -> Flat:
        self._flat.ballot.copy_(ballot)
        context = self._team.context
        if context.world_size == 1:
            return self._flat
        (host,) = self._staging.out([self._flat])
        for dtype, memory in host.memory.items():
            if self._compression is None and self._aggregation is None:
                context.all_reduce(memory, algorithm=self._algorithm, out=memory)
                continue
            # Losses and counts are not gradients: they travel as they are.
            edge = self._layout.tail_start if dtype == torch.float32 else memory.numel()
            gradients, rest = memory[:edge], memory[edge:]
            if edge and self._aggregation is not None:
                self._aggregation.combine(context, gradients)
            elif edge:
                context.all_reduce(gradients, out=gradients, compression=self._compression, name=str(dtype))
            if len(rest):
                context.all_reduce(rest, out=rest)
        return self._staging.back(host, self._flat)

    def rebind(self) -> None:
        self._flat = flat_maker(self._team, self._layout, self._device)
        self._staging.rebind()
