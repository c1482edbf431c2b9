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
    c10d._set_pg_timeout = _setting_ours(c10d._set_pg_timeout, c10d)


def _create(options: Any, _: Any = None) -> Any:
    from paceline.comm.torch_process_group.group_creation import create

    return create(options)


def _accepting_paceline(original: Any, c10d: Any) -> Any:
    """Make torch's `monitored_barrier`, which accepts groups by the backend's name "gloo", take this one
    too."""

    @wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        ours = _ours(group, c10d)
        if ours is not None:
            return ours.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    return monitored_barrier


def _setting_ours(original: Any, c10d: Any) -> Any:
    """Make torch's `_set_pg_timeout`, which knows Gloo and NCCL by their classes, set this group's too."""

    @wraps(original)
    def set_pg_timeout(timeout: Any, group: Any = None) -> None:
        ours = _ours(group, c10d)
        if ours is not None:
            ours.set_timeout(timeout)
        else:
            original(timeout, group)

    return set_pg_timeout


def _ours(group: Any, c10d: Any) -> Any:
    """Return the group that is meant, the default one in place of None, if its backend is this one."""
    chosen = group if group is not None else c10d.GroupMember.WORLD
    name, _ = c10d._world.pg_map.get(chosen, ("", None))
    return chosen if name == NAME else None
