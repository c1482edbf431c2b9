"""Gradient reduction: the contributions of all shards become one sum on every rank. One way per class.

    start()                               a step begins; what an abandoned one left is forgotten
    add_shard(shard, gradients, scalars)  a shard that this rank has computed
    reduce(counters, ownership)           the sum of all shards and of all ranks' counters; `ownership`: whose
                                          shards count, where that is not simply what the team assigns
    rebind(keep)                          the team has a new group; added shards stay, or are dropped

Canonical: the fixed tree over the shards, the same bits for any number of ranks. Plain: the fastest
all-reduce, one contribution per rank (mode="fast"). Compressed: compressed_reducer.py.

A canonical `reduce` that fails because a rank did not come leaves the partial sums as they were
(`survives_failure`): they can be reduced in another group. Only where a rank is lost in the middle of the
exchange has the sum been written over them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from paceline.comm.algorithms.shm.task import UNTOUCHED
from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.comm.compression.error_feedback import Compression
from paceline.core.errors import PacelineError
from paceline.train.step.aggregation_registry import Aggregation
from paceline.train.step.gradient_memory import FlatGradients, GradientLayout
from paceline.train.step.partial_sums import PartialSums
from paceline.train.step.step_hashes import contribution
from paceline.train.team import Team

PrivateShards = tuple[tuple[int, tuple[int, ...]], ...]
"""(committed steps, shards) for each moment at which a rank knows the residuals of these shards."""


class Residuals:
    """The residuals of a run without compression: none. `CompressedReducer` has the real ones."""

    @property
    def kept(self) -> bool:
        """Whether this rank's shards have state that no other rank has a copy of."""
        return False

    @property
    def private_shards(self) -> PrivateShards:
        """The shards whose residuals this rank knows, by the number of committed steps; the supervisor
        decides by it whether the run can continue from there."""
        return ()

    @property
    def covers_all(self) -> bool:
        """Whether this rank alone has the whole state of the run."""
        return True

    def begin(self, step: int, scale: float) -> None:
        """Begin the step after `step` committed ones, with gradients multiplied by `scale`."""

    def decide(self) -> None:
        """Commit the step's residuals: what its shards could not send is added to their next contribution."""

    def settle(self, step: int) -> None:
        """Bring the residuals to `step`: the state of this rank is that after `step` committed steps, its own
        or one that was transferred to it."""

    def export(self) -> dict[str, Tensor]:
        """Return the residuals of this rank's shards, by "<dtype>/<shard>"."""
        return {}

    def load(self, residuals: Mapping[str, Tensor], step: int) -> None:
        """Load the residuals of a checkpoint of `step`; that of a shard that has none there is zero."""

    def share(self) -> None:
        """Send each rank the residuals of the shards that it computes now; a collective call."""


NO_RESIDUALS = Residuals()


class GradientReducer(ABC):
    """One way to sum; on every rank the same one."""

    survives_failure = False  # whether shards stay held when the exchange fails
    idle_ranks_take_part = False  # whether counters of ranks without a shard are part of the sum
    watched = False  # whether what this rank gives to the sum is hashed
    contribution_hash = ""  # that hash, of the step that was reduced last; empty where it proves nothing

    def __init__(self, team: Team, layout: GradientLayout, device: torch.device) -> None:
        self._team, self._layout, self._device = team, layout, device

    @property
    def residuals(self) -> Residuals:
        return NO_RESIDUALS

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def add_shard(self, shard: int, gradients: Sequence[Tensor | None], scalars: Tensor) -> None: ...

    @abstractmethod
    def reduce(self, counters: Tensor, ownership: ShardOwnership | None = None) -> FlatGradients: ...

    @abstractmethod
    def rebind(self, *, keep: bool) -> None: ...


def new_flat_gradients(team: Team, layout: GradientLayout, device: torch.device) -> FlatGradients:
    """Return flat gradients for this team: on the CPU, with several ranks, in memory that peers can reach."""

    def memory(size: int, dtype: torch.dtype, where: torch.device) -> Tensor:
        if where.type == "cpu" and team.world_size > 1:
            return team.context.empty(size, dtype=dtype)
        return torch.empty(size, dtype=dtype, device=where)

    return FlatGradients(layout, memory, device)


@final
class HostStaging:
    """Copies in the host's memory through which gradients of a GPU travel; on the CPU there are none."""

    def __init__(self, team: Team, layout: GradientLayout, device: torch.device) -> None:
        self._team, self._layout = team, layout
        self.needed = device.type != "cpu"
        self._host: list[FlatGradients] = []

    def to_host(self, flats: Sequence[FlatGradients]) -> list[FlatGradients]:
        if not self.needed:
            return list(flats)
        while len(self._host) < len(flats):
            self._host.append(new_flat_gradients(self._team, self._layout, torch.device("cpu")))
        for host, flat in zip(self._host, flats, strict=False):
            host.copy_flat(flat)
        return self._host[: len(flats)]

    def to_device(self, host: FlatGradients, flat: FlatGradients) -> FlatGradients:
        if host is not flat:
            flat.copy_flat(host)
        return flat

    def rebind(self) -> None:
        self._host = []


@dataclass(frozen=True)
class GradientChecks:
    """Checksums of gradients: always, never, or (None) where they travel between hosts. `tamper` is called
    with this rank's gradients when they are taken: fault injection."""

    checksums: bool | None = False
    tamper: Callable[[FlatGradients], None] | None = None


@final
class CanonicalReducer(GradientReducer):
    def __init__(
        self, team: Team, layout: GradientLayout, device: torch.device, checks: GradientChecks
    ) -> None:
        super().__init__(team, layout, device)
        self._sums = PartialSums(lambda: new_flat_gradients(team, layout, device))
        self._staging = HostStaging(team, layout, device)
        self._checks = checks
        self.survives_failure = True

    def start(self) -> None:
        # With backups a shard may be computed by several ranks, and which copy counts is known only at the
        # exchange: shards are kept apart until then, and cannot be held over a change of the group.
        self.survives_failure = not self._team.backup
        self._sums.start(self._team.shards, apart=self._team.backup)

    def add_shard(self, shard: int, gradients: Sequence[Tensor | None], scalars: Tensor) -> None:
        self._sums.add_shard(shard, gradients, scalars)

    def reduce(self, counters: Tensor, ownership: ShardOwnership | None = None) -> FlatGradients:
        if ownership is not None:
            self._sums.count_only(ownership.blocks[self._team.rank])
        # One partial sum per subtree of the canonical tree that lies within this rank's shards.
        mine = self._sums.partials
        if self._team.world_size == 1:
            mine[0].counters.copy_(counters)
            return mine[0]
        target = mine[0] if mine else self._sums.take()
        partials = self._staging.to_host(mine)
        result = partials[0] if partials else self._staging.to_host([target])[0]
        if self.watched:
            # In the host's memory, where it is on its way: a GPU is not waited for once more.
            parts = (part for one in partials for part in one.without_counters)
            self.contribution_hash = contribution(parts)
        # Counters belong to the rank, not to a shard: they ride on its first partial sum.
        for position, one in enumerate(partials):
            one.counters.copy_(counters if position == 0 else torch.zeros_like(counters))
        context, ownership = self._team.context, ownership or self._team.ownership
        checksums, tamper = self._checks.checksums, None
        if self._checks.tamper is not None and partials:
            tamper = partial(self._checks.tamper, partials[0])
        if checksums is None:
            checksums = context.transport.topology.hosts > 1
        for number, (dtype, out) in enumerate(result.memory.items()):
            try:
                context.fold_partials(
                    [one.memory[dtype] for one in partials],
                    ownership,
                    out,
                    checksum=checksums,
                    after_checksum=tamper if checksums and dtype == torch.float32 else None,
                )
            except PacelineError as error:
                # The sum is made in the memory of the partial sums. A failure before the first byte is
                # written (UNTOUCHED: a rank did not come) leaves them valid for another group; a later one
                # does not, nor one in a second dtype. A GPU's own are never touched: the host has copies.
                untouched = self._staging.needed or (number == 0 and UNTOUCHED in error.facts)
                self.survives_failure = self.survives_failure and untouched
                raise
        return self._staging.to_device(result, target)

    def rebind(self, *, keep: bool) -> None:
        if not keep:
            self.start()
        self._sums.move()
        self._staging.rebind()


@final
class PlainReducer(GradientReducer):
    """One contribution per rank, summed in the fastest order, or by the algorithm that is named. Two sums of
    the same need not have the same bits, so repeating a step cannot show which rank was right."""

    def __init__(
        self,
        team: Team,
        layout: GradientLayout,
        device: torch.device,
        compression: Compression | None,
        algorithm: str,
        aggregation: Aggregation | None,
    ) -> None:
        super().__init__(team, layout, device)
        self._compression, self._algorithm, self._aggregation = compression, algorithm, aggregation
        self._flat = new_flat_gradients(team, layout, device)
        self._staging = HostStaging(team, layout, device)

    def start(self) -> None:
        if self._compression is not None:
            # A codec may have written a NaN of an earlier step between the gradients.
            self._flat.clear()

    def add_shard(self, shard: int, gradients: Sequence[Tensor | None], scalars: Tensor) -> None:
        self._flat.store(gradients, scalars)

    def reduce(self, counters: Tensor, ownership: ShardOwnership | None = None) -> FlatGradients:
        self._flat.counters.copy_(counters)
        context = self._team.context
        if context.world_size == 1:
            return self._flat
        (host,) = self._staging.to_host([self._flat])
        for dtype, memory in host.memory.items():
            if self._compression is None and self._aggregation is None:
                context.all_reduce(memory, algorithm=self._algorithm, out=memory)
                continue
            # Losses and counts are not gradients: they travel as they are.
            gradients = host.gradients[dtype]
            rest = memory[len(gradients) :]
            if len(gradients) and self._aggregation is not None:
                self._aggregation.combine(context, gradients)
            elif len(gradients):
                context.all_reduce(gradients, out=gradients, compression=self._compression, name=str(dtype))
            if len(rest):
                context.all_reduce(rest, out=rest)
        return self._staging.to_device(host, self._flat)

    def rebind(self, *, keep: bool) -> None:
        self._flat = new_flat_gradients(self._team, self._layout, self._device)
        self._staging.rebind()
