"""A training that the ranks of one mpirun make together: the rank that leads trains, with an agent on every
rank, and the other ranks return with its result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from paceline.core.errors import RankFailedError, UsageError
from paceline.frontends import joint_calls
from paceline.frontends.mpi_calls import MpiRanks
from paceline.frontends.orchestrator.orchestrator_config import TrainingConfig
from paceline.train.settings.train_config import TrainConfig

T = TypeVar("T")


def own_ranks() -> MpiRanks | None:
    """Return the ranks of the mpirun in which this process runs; None outside of one, and where they have
    formed a group."""
    link = joint_calls.joint_link()
    return link if isinstance(link, MpiRanks) else None


def check_settings(config: TrainingConfig) -> None:
    """Refuse a training that no supervisor leads: ranks take part in it as agents."""
    if not config.supervised:
        what = "ASYNC_SGD" if config.asynchronous else "fault_tolerance=False"
        raise UsageError(
            f"{what} under mpirun: ranks take part in a training as agents of its supervisor",
            remedy="train synchronously with fault_tolerance=True, or start the script without mpirun",
        )


async def train_together(
    ranks: MpiRanks,
    config: TrainConfig,
    train: Callable[[], Coroutine[Any, Any, T]],
    off_loop: Callable[[Callable[[], T]], Awaitable[T]],
) -> T:
    """Train if this rank leads, else be an agent of the rank that does; return the result on every rank.

    Cancelled on the rank that leads, it stops the training, and the other ranks get an error. Cancelled on
    another rank it waits for the end of the training, to which that rank's worker belongs.
    """
    loop = asyncio.get_running_loop()
    training: list[asyncio.Task[Any]] = []
    cancelled = False

    async def lead() -> T:
        task = asyncio.current_task()
        assert task is not None
        training.append(task)
        try:
            if cancelled:
                raise asyncio.CancelledError
            return await train()
        except asyncio.CancelledError:
            raise RankFailedError(
                f"rank {ranks.place.rank}, which led the training, was told to end it",
                remedy="resume=True continues from what was saved",
            ) from None

    def lead_from_thread() -> T:
        return asyncio.run_coroutine_threadsafe(lead(), loop).result()

    call = asyncio.ensure_future(off_loop(partial(ranks.call_together, config, lead_from_thread)))
    while not call.done():
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            cancelled = True
            for task in training:
                task.cancel()
    if cancelled:
        call.exception()  # is known: this task ended the training
        raise asyncio.CancelledError
    return call.result()
