"""The group that trains a run: its context, and which shards each rank computes. Both may change.

A run that is looked after gets a new context whenever members come or go; parts of the run ask the team each
time instead of keeping a context. Must not know why the group changes, nor what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

from paceline.comm.context import DistributedContext
from paceline.comm.shards import Holdings
from paceline.data.plan import deal

Blocks = tuple[tuple[int, ...], ...]


@final
class Team:
    """`shards` is None where each rank is a shard (mode="fast"). `announce` hears of every later context."""

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
        self.backup = False  # idle ranks compute shards of slow ones too; who counts is agreed on in the step
        self.blocks: Blocks = ()
        self.holdings = Holdings(1, ((0,),))
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
        """The group from now on; without `blocks` the shards are dealt evenly."""
        self.context, self.generation = context, generation
        self.backup = backup and self.fixed_shards is not None and context.world_size > 1
        if blocks is None or self.fixed_shards is None:
            blocks = deal(self.shards, context.world_size)
        self.blocks = tuple(tuple(block) for block in blocks)
        self.holdings = Holdings(self.shards, self.blocks)
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
