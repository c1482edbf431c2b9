"""Whether this thread is inside a run's loop, where another run cannot begin. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from paceline.core.errors import UsageError

_inside: ContextVar[bool] = ContextVar("paceline_inside_a_run", default=False)


@contextmanager
def inside_a_run() -> Iterator[None]:
    """What is called here is the user's objective, model, data or modifier, on a worker."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def refuse_inside(what: str) -> None:
    if _inside.get():
        raise UsageError(
            f"{what} was called inside a run: in an objective, a model's forward, a dataset or a modifier, "
            "which run on its workers",
            remedy="call it before or after fit; to watch a run while it trains give fit validation data, or "
            "an Observer, which runs in the process that called fit",
        )
