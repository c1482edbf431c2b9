"""What may be passed for a world size, a rank, a timeout, host groups: checked in one place, refused with
what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.comm.transport.shm.layout import check_world_size
from paceline.core.errors import UsageError


def check_world(world_size: int | None, rank: int | None) -> None:
    """Both may be None: then the environment says."""
    if world_size is not None:
        check_world_size(world_size)
    if rank is not None:
        check_rank("rank", rank, world_size)


def check_rank(name: str, rank: object, world_size: int | None) -> None:
    beyond = world_size is not None and isinstance(rank, int) and rank >= world_size
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 or beyond:
        allowed = f"from 0 to {world_size - 1}" if world_size is not None else "from 0"
        raise UsageError(
            f"{name}={rank!r} in a group of {world_size} ranks", remedy=f"{name} is a whole number {allowed}"
        )


def check_timeout(timeout: object) -> None:
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise UsageError(f"timeout={timeout!r}", remedy="a timeout is a number of seconds above 0")


def host_groups(hosts: Sequence[Sequence[int]] | None, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Ranks by host as the caller gives them; every rank exactly once."""
    if hosts is None:
        return ()
    groups = tuple(tuple(group) for group in hosts if len(group))
    named = sorted(rank for group in groups for rank in group)
    if named != list(range(world_size)):
        raise UsageError(
            f"hosts={[list(group) for group in groups]} for {world_size} ranks",
            remedy="name every rank exactly once",
        )
    return groups
