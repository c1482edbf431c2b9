"""Check what is passed for a world size, a rank, a timeout, host groups; refuse it with what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from paceline.comm.compression import PowerSGD
from paceline.comm.compression.error_feedback import Compression
from paceline.core.errors import UsageError
from paceline.core.shm_segment_layout import check_world_size
from paceline.core.wording import counted


def check_world(world_size: int | None, rank: int | None) -> None:
    """Check both; None: the environment decides."""
    if world_size is not None:
        check_world_size(world_size)
    if rank is not None:
        check_rank("rank", rank, world_size)


def check_rank(name: str, rank: object, world_size: int | None) -> None:
    beyond = world_size is not None and isinstance(rank, int) and rank >= world_size
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 or beyond:
        allowed = f"from 0 to {world_size - 1}" if world_size is not None else "from 0"
        group = f" in a group of {counted(world_size, 'rank')}" if world_size is not None else ""
        raise UsageError(f"{name}={rank!r}{group}", remedy=f"{name} is a whole number {allowed}")


def check_timeout(timeout: object) -> None:
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout > 0:
        raise UsageError(f"timeout={timeout!r}", remedy="a timeout is a number of seconds above 0")


def host_groups(hosts: Sequence[Sequence[int]] | None, world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return ranks by host as the caller gives them; every rank exactly once."""
    if hosts is None:
        return ()
    given = f"hosts={hosts!r} for {counted(world_size, 'rank')}"
    remedy = "pass lists of ranks, one per host, that name every rank exactly once"
    try:
        groups = tuple(tuple(group) for group in hosts if len(group))
        named = sorted(rank for group in groups for rank in group)
    except TypeError as error:
        raise UsageError(given, remedy=remedy) from error
    if named != list(range(world_size)):
        raise UsageError(given, remedy=remedy)
    return groups


def check_algorithm_kind(algorithm: object, compression: object) -> None:
    """Refuse what is neither a name nor a compression, before anything looks it up."""
    if not isinstance(algorithm, str):
        raise UsageError(f"algorithm={algorithm!r}", remedy="algorithm is a name, such as 'auto' or 'ring'")
    if not isinstance(compression, Compression | PowerSGD | None):
        raise UsageError(
            f"compression={compression!r}",
            remedy="pass quantize_gradients(8), sparsify_gradients(), cast_gradients('fp16') or PowerSGD()",
        )


def shape_of(size: tuple[object, ...]) -> torch.Size:
    """Return a shape given as numbers or as one sequence of them."""
    sides = size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size
    assert isinstance(sides, list | tuple)
    if not all(isinstance(side, int) and not isinstance(side, bool) and side >= 0 for side in sides):
        raise UsageError(f"empty: {list(sides)} is not a shape", remedy="sizes are whole numbers from 0")
    return torch.Size(cast("list[int]", sides))
