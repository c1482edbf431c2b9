"""Whole training runs for the tests of this folder: alone in this process, or on ranks that are its threads.

Ranks in threads share the random generators of the process, so what draws numbers while it trains (dropout,
augmentation) is tested in processes instead: see test_same_bits.py.
"""

from __future__ import annotations

import copy
import dataclasses
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.context import DistributedContext
from paceline.testing.thread_transport import run_ranks
from paceline.train.history import History
from paceline.train.loop import process_setup, worker_jobs
from paceline.train.loop.worker_jobs import TrainJob
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig
from paceline.train.state.run_folder import RunFolder
from paceline.train.stop_signals import STOP_SIGNALS

WORKERS = (1, 2, 3, 4, 6)


def settings(**given: Any) -> TrainConfig:
    """A resolved config of a quiet run in the current process."""
    defaults: dict[str, Any] = {"progress": False, "threads": 1, "global_batch": 12, "shards": 6}
    return TrainConfig(**{**defaults, **given}).resolved(1)


def job(
    model: nn.Module | Callable[[], nn.Module],
    data: Any,
    *,
    objective: Callable[..., Any] | None = None,
    optimizer: Any = None,
    callbacks: Sequence[Any] = (),
    validation: Any = None,
    run_dir: Path | None = None,
    **given: Any,
) -> TrainJob:
    config = settings(run_dir=None if run_dir is None else str(run_dir), **given)
    return TrainJob(
        model=model,
        objective=objective or nn.functional.mse_loss,
        optimizer=optimizer or (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        config=config,
        train=data,
        validation=validation,
        callbacks=callbacks,
        folder=None if run_dir is None else RunFolder.for_config(config).path,
    )


@dataclasses.dataclass
class Outcome:
    """What a run left: the module of every rank, and the main rank's history."""

    modules: list[nn.Module]
    history: History

    @property
    def module(self) -> nn.Module:
        return self.modules[0]

    @property
    def hash(self) -> str:
        return self.history.state_hash

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.history.steps]


def train(given: TrainJob, workers: int = 1, callbacks: Callable[[], Sequence[Any]] | None = None) -> Outcome:
    """Trains copies of the job's model, in this process; `callbacks` makes those of one rank."""
    config = dataclasses.replace(given.config, workers=workers)
    copies = [copy.deepcopy(given.model) for _ in range(workers)]

    def one(context: DistributedContext) -> tuple[nn.Module, History | None]:
        module = process_setup.build_model(copies[context.rank], config.seed)
        mine = dataclasses.replace(given, model=module, config=config)
        if callbacks is not None:
            mine = dataclasses.replace(mine, callbacks=callbacks())
        trained = worker_jobs.train(context, mine)
        return module, trained.history

    if workers == 1:
        with handlers_as_before(), DistributedContext(1, 0) as context:
            ended = [one(context)]
    else:
        # Around the ranks, so that none puts the process back while others still train.
        with process_setup.prepared(config):
            ended = run_ranks(workers, one, timeout=60)
    history = ended[0][1]
    assert history is not None
    return Outcome([module for module, _ in ended], history)


@contextmanager
def handlers_as_before() -> Iterator[None]:
    """A worker that has done its work ignores signals from then on; this process has more to do."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hashes(given: TrainJob, workers: Sequence[int] = WORKERS) -> list[str]:
    return [train(given, count).hash for count in workers]


def no_checkpoints() -> CheckpointConfig:
    return CheckpointConfig(enabled=False)


def regression(samples: int, features: int = 5, outputs: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    return x, torch.sin(x @ torch.randn(features, outputs, generator=generator))


_drawing = threading.Lock()  # torch's generator is the process's: ranks that are threads draw in turn


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with _drawing, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def mlp(features: int = 5, outputs: int = 2, hidden: int = 8) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, outputs)))
