"""Initialising and cleaning up: neither holds up the loop, and neither leaves anything half done."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.frontends.orchestrator.parts import small, train, until

from paceline.core.errors import ResourceError, UsageError
from paceline.frontends.orchestrator import orchestrator
from paceline.frontends.orchestrator.observed_state import WorkerState
from paceline.frontends.orchestrator.orchestrator import DistributedTrainingOrchestrator


class Held:
    """In place of `spawn`: begins, and is over when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._error = error

    def __call__(self, *args: object, **options: object) -> None:
        self.begun.set()
        assert self.go.wait(10.0), "the loop stood still"
        if self._error is not None:
            raise self._error


def pool_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("paceline-orchestrator")]


def states(made: DistributedTrainingOrchestrator) -> set[WorkerState]:
    return {node.state for node in made.workers}


def test_cleaning_up_while_workers_are_initialised_waits_off_the_loop(monkeypatch):
    held = Held()
    monkeypatch.setattr(orchestrator, "spawn", held)

    async def main() -> None:
        made = DistributedTrainingOrchestrator(2)
        initializing = asyncio.create_task(made.initialize_workers())
        await until(held.begun.is_set)
        closing = asyncio.create_task(made.cleanup())
        turns = 0

        def some_turns_are_taken() -> bool:
            nonlocal turns
            turns += 1
            return turns > 20

        await until(some_turns_are_taken)
        assert not closing.done()
        held.go.set()
        await closing
        with pytest.raises(UsageError, match="while initialize_workers"):
            await initializing
        assert states(made) == {WorkerState.STOPPED}
        assert not pool_threads()

    asyncio.run(main())


def test_workers_that_could_not_be_initialised_can_be_tried_again(tmp_path, monkeypatch):
    async def main() -> None:
        made = DistributedTrainingOrchestrator(1)
        failing = Held(ResourceError("no more processes", remedy="free some"))
        failing.go.set()
        with monkeypatch.context() as patched:
            patched.setattr(orchestrator, "spawn", failing)
            with pytest.raises(ResourceError, match="no more processes"):
                async with made:
                    pytest.fail("it was entered")
        assert states(made) == {WorkerState.CREATED}
        await until(lambda: not pool_threads())
        async with made:
            assert states(made) == {WorkerState.IDLE}
            result = await train(made, small(tmp_path / "run", epochs=1))
            assert result["epochs_completed"] == 1
        assert not pool_threads()

    asyncio.run(main())


def test_initialising_can_be_cancelled_and_done_again(monkeypatch):
    held = Held()
    monkeypatch.setattr(orchestrator, "spawn", held)

    async def main() -> None:
        made = DistributedTrainingOrchestrator(2)
        initializing = asyncio.create_task(made.initialize_workers())
        await until(held.begun.is_set)
        with pytest.raises(UsageError, match="being initialised"):
            await made.initialize_workers()
        with pytest.raises(UsageError, match="before initialize_workers"):
            await train(made, {})
        initializing.cancel()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await initializing
        await made.initialize_workers()
        assert states(made) == {WorkerState.IDLE}
        await made.cleanup()

    asyncio.run(main())


def test_workers_that_fail_to_start_while_it_is_cleaned_up(monkeypatch):
    held = Held(ResourceError("no more processes", remedy="free some"))
    monkeypatch.setattr(orchestrator, "spawn", held)

    async def main() -> None:
        made = DistributedTrainingOrchestrator(2)
        initializing = asyncio.create_task(made.initialize_workers())
        await until(held.begun.is_set)
        closing = asyncio.create_task(made.cleanup())
        held.go.set()
        await closing
        with pytest.raises(ResourceError, match="no more processes"):
            await initializing
        with pytest.raises(UsageError, match="that is closed"):
            await made.initialize_workers()

    asyncio.run(main())
