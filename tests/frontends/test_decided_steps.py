"""Workers that are lost or cut off between two exchanges of one step, in real processes: the bits are those
of one process, no healthy worker is blamed, and nothing goes back to a checkpoint that need not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.frontends.supervised_runs import check_exactly_once, of, supervised
from tests.train.small_run import Signals, data, fit, settings, steps_of
from tests.waiting import wait_for
from torch import Tensor, nn

import paceline
from paceline.comm.collectives.call_queue import CallQueue
from paceline.core import events
from paceline.core.errors import GroupInterruptedError
from paceline.train.callbacks import Modifier
from paceline.train.settings.train_config import GradientCompression, TrainConfig
from paceline.train.step.transaction import StepTransaction

STEP = 8
COMPRESSED: dict[str, Any] = {"compression": GradientCompression(kind="int8")}
UNATTENDED: dict[str, Any] = {"fault_tolerance": paceline.FaultTolerance(enabled=False)}


class Strikes(Modifier):
    """In step STEP, the worker of `rank` is killed before its `call`-th exchange or cut off after it; `late`:
    when all others have decided the step. Once in the whole run."""

    def __init__(
        self, folder: Path, rank: int, call: int, kind: Literal["killed", "cut"], *, late: bool = False
    ) -> None:
        self._mark, self._rank, self._call, self._kind = folder / "struck", rank, call, kind
        self._decided = [folder / f"decided-{other}" for other in range(3) if other != rank] if late else []
        self._seen = 0

    def change_gradients(self, parameters: Any) -> None:
        self._seen += 1
        if self._seen == STEP:
            (self._mark.parent / f"decided-{os.environ['RANK']}").touch()
        if self._seen == STEP - 1 and os.environ["RANK"] == str(self._rank) and not self._mark.exists():
            self._arm()

    def _arm(self) -> None:
        reduce = StepTransaction.reduce

        def armed(transaction: StepTransaction, *args: Any) -> Any:
            StepTransaction.reduce = reduce  # type: ignore[method-assign]
            self._count_calls()
            return reduce(transaction, *args)

        StepTransaction.reduce = armed  # type: ignore[assignment, method-assign]

    def _count_calls(self) -> None:
        run, calls = CallQueue.run, 0

        def struck(queue: CallQueue, *args: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls < self._call:
                return run(queue, *args, **named)
            self._mark.touch()
            if self._kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            CallQueue.run = run  # type: ignore[method-assign]
            run(queue, *args, **named)
            wait_for(lambda: all(file.exists() for file in self._decided))
            queue.interrupt("it is late")
            raise GroupInterruptedError("it is late")

        CallQueue.run = struck  # type: ignore[assignment, method-assign]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 6, sparse=True)
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + self.words((x[:, 0] * 4).long().clamp(-4, 3) + 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05)


def fit_words(config: TrainConfig, callbacks: Any = ()) -> str:
    trainer = paceline.Trainer(
        Words, nn.CrossEntropyLoss(), optimizer=sgd, config=config, callbacks=list(callbacks)
    )
    return trainer.fit(data()).state_hash


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fit_words(settings(tmp_path_factory.mktemp("words") / "run", 1, **UNATTENDED))


@pytest.fixture(scope="module")
def compressed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("compressed") / "run"
    return fit(settings(folder, 1, **UNATTENDED, **COMPRESSED)).state_hash


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fit(settings(tmp_path_factory.mktemp("plain") / "run", 1, **UNATTENDED)).state_hash


@pytest.mark.parametrize("kind", ["killed", "cut"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("rank", [0, 2])
def test_between_the_sums_of_dense_and_sparse_gradients(
    rank: int, call: int, kind: Literal["killed", "cut"], tmp_path: Path, words: str
) -> None:
    folder = tmp_path / "run"
    assert fit_words(supervised(folder, 3), [Strikes(tmp_path, rank, call, kind)]) == words
    assert (tmp_path / "struck").exists()
    assert {event.rank for event in of(events.WorkerFailed, folder)} == (
        {rank} if kind == "killed" else set()
    )
    assert not of(events.RunResumed, folder)
    check_exactly_once(folder)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_worker_that_is_late_keeps_what_its_shards_owe(rank: int, tmp_path: Path, compressed: str) -> None:
    folder = tmp_path / "run"
    history = fit(supervised(folder, 3, **COMPRESSED), [Strikes(tmp_path, rank, 1, "cut", late=True)])
    assert history.state_hash == compressed
    views = of(events.ViewChanged, folder)
    assert len(views) == 2
    assert rank in views[1].behind  # others may have been late as well
    assert not of(events.WorkerFailed, folder)
    assert not of(events.RunResumed, folder)
    check_exactly_once(folder)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_worker_that_leaves_hands_over_what_its_shards_owe(
    rank: int, tmp_path: Path, compressed: str
) -> None:
    folder = tmp_path / "run"
    history = fit(supervised(folder, 3, **COMPRESSED), [Signals(folder, STEP, [rank])])
    assert history.state_hash == compressed
    assert [(event.rank, event.cause) for event in of(events.WorkerFailed, folder)] == [(rank, "preempted")]
    assert not of(events.RunResumed, folder)
    assert len(steps_of(folder)) == len(set(steps_of(folder)))
    check_exactly_once(folder)


def test_a_worker_that_is_killed_with_what_its_shards_owe(tmp_path: Path, compressed: str) -> None:
    """Only it had that: all go back to the last checkpoint, and the journal says why."""
    folder = tmp_path / "run"
    history = fit(supervised(folder, 3, **COMPRESSED), [Strikes(tmp_path, 1, 1, "killed")])
    assert history.state_hash == compressed
    assert of(events.RunResumed, folder)
    assert any("the compression residual" in view.reason for view in of(events.ViewChanged, folder))
    check_exactly_once(folder)


@pytest.mark.parametrize(("rank", "workers"), [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])
def test_killed_after_its_shards_were_announced(rank: int, workers: int, tmp_path: Path, plain: str) -> None:
    folder = tmp_path / "run"
    config = supervised(
        folder, workers, f"kill rank={rank} step={STEP} phase=collective", care={"stragglers": "backup"}
    )
    assert fit(config).state_hash == plain
    assert [event.rank for event in of(events.WorkerFailed, folder)] == [rank]
    assert not of(events.Verdict, folder)
    check_exactly_once(folder)
