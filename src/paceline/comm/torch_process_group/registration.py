"""Registration of the backend with torch.distributed.

torch loads this module through the entry point `torch.backends` whenever it is imported in an environment
with Paceline: nothing of `comm` is imported before a group is made."""

from __future__ import annotations

from functools import wraps
from typing import Any

from paceline.comm.torch_process_group import NAME


def register() -> None:
    """Register "paceline" for CPU tensors; a second call does nothing."""
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    from torch.distributed import distributed_c10d as c10d

    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    barrier = _accepting_paceline(c10d.monitored_barrier, c10d)
    dist.monitored_barrier = c10d.monitored_barrier = barrier


def _create(options: Any, _: Any = None) -> Any:
    from paceline.comm.torch_process_group.group_creation import create

    return create(options)


def _accepting_paceline(original: Any, c10d: Any) -> Any:
    """Make torch's `monitored_barrier`, which accepts groups by the backend's name "gloo", take this one
    too."""

    @wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        chosen = group if group is not None else c10d.GroupMember.WORLD
        name, _ = c10d._world.pg_map.get(chosen, ("", None))
        if name == NAME:
            return chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    return monitored_barrier
