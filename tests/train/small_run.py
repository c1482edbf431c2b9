"""A run that is small and has everything that a fault could break: dropout, BatchNorm, Adam, an uneven end of
each epoch, evaluation. Also a program: `python -m tests.train.small_run FOLDER WORKERS [key=value ...]`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.waiting import wait_for
from torch import Tensor, nn

import paceline
from paceline.core import events, journal
from paceline.elastic.supervisor.supervisor_recovery import SnapshotFile
from paceline.train.callbacks import Modifier, Observer
from paceline.train.history import History, StepRecord
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig
from paceline.train.stop_signals import StopRequest

SHARDS = 4
STEPS_OF_EPOCH = 5
EPOCHS = 6
STEPS = STEPS_OF_EPOCH * EPOCHS
UNATTENDED = paceline.FaultTolerance(enabled=False)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-2)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(54, 6, generator=generator), torch.randint(0, 3, (54,), generator=generator)


def settings(folder: Path, workers: int = 2, **changes: Any) -> TrainConfig:
    config = TrainConfig(
        workers=workers,
        shards=SHARDS,
        threads=1,
        global_batch=12,
        epochs=EPOCHS,
        seed=5,
        device="cpu",
        progress=False,
        run_dir=str(folder),
        checkpoint=CheckpointConfig(every_steps=4, every_epochs=1),
    )
    return dataclasses.replace(config, **changes)


def trainer(
    config: TrainConfig,
    callbacks: Sequence[Observer | Modifier] = (),
    *,
    model: Any = build,
    objective: Callable[..., Any] | None = None,
) -> paceline.Trainer:
    return paceline.Trainer(
        model, objective or nn.CrossEntropyLoss(), optimizer=adam, config=config, callbacks=callbacks
    )


def fit(config: TrainConfig, callbacks: Sequence[Observer | Modifier] = (), **parts: Any) -> History:
    return trainer(config, callbacks, **parts).fit(data(), data())


def journal_of(folder: Path) -> list[events.Event]:
    file = folder / "journal.jsonl"
    return list(journal.iterate(file)) if file.exists() else []


def steps_of(folder: Path) -> list[int]:
    return [event.step for event in journal_of(folder) if isinstance(event, events.StepCommitted)]


def workers_of(folder: Path) -> dict[int, int]:
    """Rank to pid, of the newest start."""
    return {event.rank: event.pid for event in journal_of(folder) if isinstance(event, events.WorkerStarted)}


def first() -> bool:
    """Whether this is the first rank of its group."""
    return not paceline.is_initialized() or paceline.get_rank() == 0


class Signals(Modifier):
    """After a step, signals some processes of the job: "main", ranks, or all of them.

    Afterwards training waits until a request to the main process has arrived, so that it cannot end before.
    """

    def __init__(
        self, folder: Path, step: int, to: Sequence[str | int], number: int = signal.SIGTERM
    ) -> None:
        self.folder, self.step, self.to, self.number = folder, step, to, number
        self.main = os.getpid()

    def stop(self, record: StepRecord) -> None:
        if record.step == self.step and first():
            self.send()

    def send(self) -> None:
        ranks = workers_of(self.folder)
        with asked_to_stop(self.folder) as asked:
            for who in self.to:
                os.kill(self.main if isinstance(who, str) else ranks[who], self.number)
            # Members that were signalled too leave: only after that view change are the others told to stop.
            leaves = any(isinstance(who, int) for who in self.to)
            if "main" in self.to:
                wait_for(lambda: asked() or (leaves and _supervisor_knows(self.folder)))


@contextmanager
def asked_to_stop(folder: Path) -> Iterator[Callable[[], bool]]:
    """Whether this worker has heard since that the run is to stop: from its supervisor, or from a file."""
    heard = threading.Event()
    ask = StopRequest.ask

    def listen(request: StopRequest, reason: str) -> None:
        ask(request, reason)
        heard.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopRequest, "ask", listen)
        yield lambda: heard.is_set() or (folder / "stop").exists()


def _supervisor_knows(folder: Path) -> bool:
    known = SnapshotFile(folder).load()
    return known is not None and known.began.stop_reason is not None


class Holds(Modifier):
    """After a step, training waits until a file is there or the process is ended.

    With `until=None` it waits for a request to stop: a SIGTERM, or what the supervisor was told.
    """

    def __init__(self, folder: Path, step: int, until: Path | None) -> None:
        self.folder, self.step, self.until = folder, step, until
        self.arrived = False

    def stop(self, record: StepRecord) -> None:
        if not first():
            return
        if record.step == 1:  # long before it can come
            self.listen()
        if record.step == self.step:
            with asked_to_stop(self.folder) as asked:
                wait_for(lambda: self.arrived or asked() if self.until is None else self.until.exists())

    def listen(self) -> None:
        """Note requests from now on, in this process of the program: one that comes while the step of the
        hold ends would be missed by who listens from the hold on."""
        handler: Any = signal.getsignal(signal.SIGTERM)
        ask = StopRequest.ask

        def note(number: int, frame: FrameType | None) -> None:
            self.arrived = True
            handler(number, frame)

        def note_request(request: StopRequest, reason: str) -> None:
            self.arrived = True
            ask(request, reason)

        signal.signal(signal.SIGTERM, note)
        StopRequest.ask = note_request  # type: ignore[assignment, method-assign]


def main(folder: str, workers: str, *rest: str) -> None:
    options = dict(item.split("=", 1) for item in rest)
    path = Path(folder)
    hold = int(options.pop("hold", 0))
    until = options.pop("until", "")
    care = paceline.FaultTolerance(enabled=options.pop("care", "yes") == "yes")
    callbacks = [Holds(path, hold, Path(until) if until else None)] if hold else []
    history = fit(settings(path, int(workers), fault_tolerance=care, **options), callbacks)
    print(history.state_hash)


if __name__ == "__main__":
    main(*sys.argv[1:])
