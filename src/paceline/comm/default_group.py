"""The group that plain functions and models use when none is passed: one per process.

A launcher that connects the ranks itself (`paceline.spawn`) offers its context; `init_process_group` takes
that one or makes another. Holds contexts and nothing else: how they come to be, and what is done with them,
is decided above.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.comm.context import DistributedContext


@dataclass
class _State:
    context: DistributedContext | None = None
    offered: DistributedContext | None = None
    explicit: bool = False


_state = _State()


def offer(context: DistributedContext) -> None:
    """Make a launcher's context the default, until a group is initialised explicitly."""
    _state.context = _state.offered = context
    _state.explicit = False


@contextmanager
def offering(context: DistributedContext) -> Iterator[None]:
    """Make `context` the default inside the block; after it all is as it was before."""
    before = replace(_state)
    offer(context)
    try:
        yield
    finally:
        vars(_state).update(vars(before))


def offered() -> DistributedContext | None:
    """Return what this process's launcher offered, if one did."""
    return _state.offered


def install(context: DistributedContext) -> None:
    """Make `context` the default because the user asked for it."""
    _state.context = context
    _state.explicit = True


def is_explicit() -> bool:
    """Return whether the user asked for the present default, as opposed to a launcher's offer."""
    return _state.explicit


def clear() -> DistributedContext | None:
    """Leave the process without a default, and return the one it had. An offer can be taken up again."""
    context, _state.context = _state.context, None
    _state.explicit = False
    return context


def current() -> DistributedContext | None:
    return _state.context


def required(what: str) -> DistributedContext:
    """Return the default group; raise if there is none."""
    if _state.context is None:
        raise UsageError(
            f"{what}: this process belongs to no group of ranks",
            remedy="call paceline.init_process_group() first, or run the code in paceline.spawn(...)",
        )
    return _state.context
