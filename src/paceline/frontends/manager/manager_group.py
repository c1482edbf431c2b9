"""The group of the manager's processes: how they meet, what they say about it, and how a process leaves."""

from __future__ import annotations

import logging
import os
from typing import Self, final

from paceline.comm import default_group
from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous.environment import LaunchInfo
from paceline.comm.rendezvous.launcher_policies import why_survivors_end
from paceline.comm.survivors.repairable_group import RepairableGroup
from paceline.comm.survivors.survivor_meeting import SurvivorMeeting
from paceline.core.available_resources import cores
from paceline.core.errors import UsageError
from paceline.frontends import launcher_link
from paceline.frontends.manager.manager_config import ManagerConfig
from paceline.frontends.process_group import (
    destroy_process_group,
    init_process_group,
    uninstall_process_group,
)

_log = logging.getLogger(__name__)


@final
class ManagerGroup:
    """One process's place among those that train. `least_cores`: of the machine that has the fewest."""

    def __init__(
        self, repairable: RepairableGroup, kept: DistributedContext | None, least_cores: int
    ) -> None:
        self.repairable, self.least_cores = repairable, least_cores
        self._kept = kept  # a group that the caller made, or spawn: it outlives this one

    @classmethod
    def meet(cls, config: ManagerConfig, launch: LaunchInfo) -> Self:
        """Meet the other processes; a collective call."""
        explicit = default_group.is_explicit()
        kept = default_group.current() if explicit else default_group.offered()
        context = default_group.current() if explicit else None
        if context is None:
            where = "env://" if config.address is None else f"tcp://{config.address}"
            world_size, rank = config.world_size, config.local_rank
            context = init_process_group("auto", where, world_size, rank, timeout=config.timeout)
        try:
            _check_place(config, context)
            least_cores = min(context.all_gather(cores()))
            meeting = SurvivorMeeting.arrange(context, launch.address.host, config.timeout)
        except BaseException:
            if context is not kept:
                destroy_process_group()
            raise
        _warn_where_survivors_end(context)
        return cls(RepairableGroup(context, meeting), kept, least_cores)

    @property
    def context(self) -> DistributedContext:
        return self.repairable.context

    def leave(self) -> None:
        """Leave it: the others see this process as gone."""
        if default_group.current() is self.context and self.context is not self._kept:
            uninstall_process_group()
        self.repairable.close(self._kept)


def _check_place(config: ManagerConfig, context: DistributedContext) -> None:
    if (context.world_size, context.rank) != (config.world_size, config.local_rank):
        raise UsageError(
            f"world_size={config.world_size} and local_rank={config.local_rank}, and this "
            f"process is rank {context.rank} of a group of {context.world_size}",
            remedy="leave world_size and local_rank out",
        )


def _warn_where_survivors_end(context: DistributedContext) -> None:
    reason = "" if launcher_link.keep_survivors() else why_survivors_end(os.environ)
    if default_group.offered() is not None:
        reason = "spawn ends all processes when one dies"
    if reason and context.is_master and context.world_size > 1:
        _log.warning("a process that dies cannot be left behind: %s", reason)
