"""Jobs of fake members under a real supervisor, and a look at what its journal says."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.elastic.fake_member import ENTRY

from paceline.control.worker_options import WorkerOptions
from paceline.core import journal
from paceline.core.events import Event, StepCommitted, ViewChanged, WorkerStarted
from paceline.core.listen_address import ANY_PORT, ListenAddress
from paceline.core.tls import Tls
from paceline.elastic.machine.settings import MachineSettings
from paceline.elastic.supervisor.parent_messages import JobOutcome, SupervisedJob
from paceline.elastic.supervisor.supervisor_launcher import SupervisorLauncher
from paceline.engines.local import memfd_pickle

PRELOAD = ("tests.elastic.fake_member",)
QUICK: dict[str, Any] = {
    "silence_least": 1.0,
    "hang_least": 1.0,
    "hang_steps": 5.0,
    "slow_phase_seconds": 20.0,
    "backoff": 0.05,
    "backoff_most": 0.1,
}


class Run:
    """A job that was started, and its journal."""

    def __init__(self, supervised: SupervisorLauncher, folder: Path) -> None:
        self.supervised = supervised
        self.folder = folder

    @property
    def events(self) -> tuple[Event, ...]:
        path = self.folder / "journal.jsonl"
        return journal.read(path).events if path.exists() else ()

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.of(StepCommitted)]

    def pids(self) -> dict[int, int]:
        """The newest process of each rank."""
        return {event.rank: event.pid for event in self.of(WorkerStarted)}

    def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> None:
        """Wait, as a caller does, until the journal says so."""
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, f"not in {seconds} s; the journal ends:\n{self.tail()}"
            outcome = self.supervised.wait(0.02)
            assert outcome is None, f"the job ended: {outcome}\n{self.tail()}"

    def until_step(self, step: int) -> None:
        self.until(lambda: self.steps and self.steps[-1] >= step)

    def until_views(self, count: int) -> None:
        self.until(lambda: len(self.of(ViewChanged)) >= count)

    def finish(self, seconds: float = 40.0) -> JobOutcome:
        outcome = self.supervised.wait(seconds)
        assert outcome is not None, f"still not over:\n{self.tail()}"
        return outcome

    def tail(self, lines: int = 12) -> str:
        path = self.folder / "journal.jsonl"
        return "\n".join(path.read_text().splitlines()[-lines:]) if path.exists() else "nothing"


def settings(workers: int = 3, **changes: Any) -> MachineSettings:
    return MachineSettings(**{"workers": workers, "shards": 8, **QUICK, **changes})


@contextlib.contextmanager
def running(
    folder: Path,
    *,
    workers: int = 3,
    machine: dict[str, Any] | None = None,
    tls: Tls | None = None,
    bind: str = "127.0.0.1",
    port: int = 0,
    listening: ListenAddress = ANY_PORT,
    **options: Any,
) -> Iterator[Run]:
    """A started job; whatever is left of it is gone afterwards."""
    own: dict[str, Any] = {"patience": 20.0, "tls": tls}
    own |= {name: options.pop(name) for name in ("patience", "exact") if name in options}
    packed = memfd_pickle.dump({"steps": 100, "step_seconds": 0.01, **options})
    job = SupervisedJob(
        entry=ENTRY,
        preload=PRELOAD,
        settings=settings(workers, **(machine or {})),
        folder=folder,
        threads=1,
        options=WorkerOptions(**own),
        bind=bind,
        port=port,
        listening=listening,
    )
    supervised = SupervisorLauncher(job, packed)
    try:
        supervised.start()
        yield Run(supervised, folder)
    finally:
        supervised.close()
        os.close(packed)


def result_of(outcome: JobOutcome) -> Any:
    """What the first member returned."""
    assert outcome.result is not None
    try:
        return memfd_pickle.load(outcome.result)
    finally:
        os.close(outcome.result)


def drop(outcome: JobOutcome) -> JobOutcome:
    """Give back an outcome's descriptors."""
    for descriptor in outcome.descriptors:
        os.close(descriptor)
    return outcome
