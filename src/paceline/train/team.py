"""The group that trains a run: its context, and which shards each rank computes. Both may change.

Under a supervisor the context is replaced whenever members join or leave; parts of the run ask the team each
time instead of keeping a context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.comm.context import DistributedContext
from paceline.core.errors import PeerLostError
from paceline.core.wording import listed
from paceline.data.batch_plan import assign

Blocks = tuple[tuple[int, ...], ...]


@final
class Team:
    """`shards` is None where each rank is a shard (mode="fast"). `announce` is called with every later
    context."""

    def __init__(
        self,
        context: DistributedContext,
        shards: int | None,
        *,
        announce: Callable[[DistributedContext], None] | None = None,
    ) -> None:
        self.context = context
        self.fixed_shards = shards
        self.generation = 0
        self.backup = False  # idle ranks compute shards of slow ones too; the step decides whose count
        self.blocks: Blocks = ()
        self.ownership = ShardOwnership(1, ((0,),))
        self._announce: Callable[[DistributedContext], None] | None = None
        self.install(context)
        self._announce = announce

    def install(
        self,
        context: DistributedContext,
        blocks: Sequence[Sequence[int]] | None = None,
        generation: int = 0,
        *,
        backup: bool = False,
    ) -> None:
        """Replace the group; without `blocks` the shards are assigned evenly."""
        self.context, self.generation = context, generation
        self.backup = backup and self.fixed_shards is not None and context.world_size > 1
        if blocks is None or self.fixed_shards is None:
            blocks = assign(self.shards, context.world_size)
        self.blocks = tuple(tuple(block) for block in blocks)
        self.ownership = ShardOwnership(self.shards, self.blocks)
        if self._announce is not None:
            self._announce(context)

    @property
    def shards(self) -> int:
        return self.context.world_size if self.fixed_shards is None else self.fixed_shards

    @property
    def block(self) -> tuple[int, ...]:
        """The shards that this rank computes."""
        return self.blocks[self.context.rank]

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def world_size(self) -> int:
        return self.context.world_size

    @property
    def is_master(self) -> bool:
        return self.context.is_master


def first_owners(computed: Sequence[Sequence[int]], shards: int, step: int) -> ShardOwnership:
    """Return the rank whose copy of each shard counts: the first of those that have computed it. `computed`:
    the shards of each rank."""
    owner: dict[int, int] = {}
    for rank, mine in enumerate(computed):
        for shard in mine:
            owner.setdefault(shard, rank)
    if len(owner) < shards:
        missing = sorted(set(range(shards)) - owner.keys())
        which = f"shard {missing[0]} was" if len(missing) == 1 else f"shards {listed(missing)} were"
        raise PeerLostError(f"step {step}: {which} left to a rank that is gone")
    blocks = [
        tuple(shard for shard in sorted(owner) if owner[shard] == rank) for rank in range(len(computed))
    ]
    return ShardOwnership(shards, tuple(blocks))
