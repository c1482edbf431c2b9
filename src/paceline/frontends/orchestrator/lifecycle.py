"""States of an orchestrator, and calls that may block, made from its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Final, TypeVar, final

T = TypeVar("T")

_THREADS: Final = 4


@final
class OrchestratorState(Enum):
    NEW = "new"
    INITIALIZING = "being initialised"
    READY = "ready"
    TRAINING = "training"
    CLOSED = "closed"


@final
class EndRequest(Enum):
    NONE = "none"
    STOP = "finish the step, save, end"
    KILL = "end at once"


@final
class ThreadCalls:
    """A few threads for calls that may block."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="paceline-orchestrator")

    def start(self, do: Callable[[], T]) -> asyncio.Future[T]:
        """Start a call, from the event loop."""
        return asyncio.get_running_loop().run_in_executor(self._pool, do)

    def shutdown(self, *, wait: bool = True) -> None:
        self._pool.shutdown(wait=wait)


async def finished(future: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise
