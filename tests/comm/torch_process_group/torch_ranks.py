"""Processes that are ranks of a torch.distributed group on the backend "paceline"."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.comm.context import DistributedContext
from paceline.frontends.spawn import spawn

_KEPT: list[object] = []  # to the end of a rank
PRELOAD = ("paceline.torch_backend", "paceline.comm.torch_process_group.group_creation")


def torch_ranks(
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    timeout: float = 60.0,
    backend: str = "paceline",
    hosts: int = 1,
) -> list[Any]:
    """Call `fn(rank, *args)` on ranks whose default group has this backend; return what each returned. Ranks
    of different `hosts` share no memory."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        return spawn(
            _in_group,
            fn,
            (backend, store, hosts),
            timeout,
            *args,
            workers=workers,
            threads=1,
            timeout=100,
            preload=PRELOAD,
        )


def _in_group(
    ctx: DistributedContext, fn: Callable[..., Any], group: tuple[str, str, int], timeout: float, *args: Any
) -> Any:
    import paceline.torch_backend  # noqa: F401

    backend, store, hosts = group
    os.environ["PACELINE_HOST"] = f"host{ctx.rank * hosts // ctx.world_size}"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=ctx.rank,
        world_size=ctx.world_size,
        timeout=timedelta(seconds=timeout),
    )
    try:
        return fn(ctx.rank, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def gloo_group() -> Any:
    """Make a group over Gloo that stays to the end of its process: torch 2.13 aborts one in which the last
    reference to such a group ends in a thread of the group's own, as with a communication hook's callback."""
    group = dist.new_group(backend="gloo")
    _KEPT.append(group)
    return group


def failure_of(call: Callable[[], Any]) -> tuple[str, str, bool]:
    """Return the type of a call's error and of its cause, its text, and whether torch's users catch it. The
    call is a lambda, so that the line in the text is the test's."""
    try:
        call()
    except Exception as error:
        kinds = f"{type(error).__name__} from {type(error.__cause__).__name__}"
        return kinds, str(error), isinstance(error, RuntimeError)
    return "nothing", "", False
