"""What the loops of Horovod and TensorFlow need of their frameworks, for one rank in this process: the loops'
own decisions are tested here, and with the frameworks in tests/clusters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

import paceline
from paceline.frontends.framework_trainers.framework_run import FrameworkWorker
from paceline.frontends.framework_trainers.horovod_data import RankBatches
from paceline.frontends.framework_trainers.horovod_loop import HorovodLoop, LoopSettings
from paceline.frontends.framework_trainers.horovod_state import HorovodState
from paceline.frontends.framework_trainers.strategy_group import StrategyGroup
from paceline.frontends.framework_trainers.tensorflow_loop import TensorFlowLoop
from paceline.train.objective import Objective

HERE, THERE = FrameworkWorker(0, 1, "here"), FrameworkWorker(1, 2, "there")


class RankLostError(Exception):
    """Horovod's HorovodInternalError."""


class ElasticState:
    """hvd.elastic.TorchState: what was committed comes back with `restore`."""

    def __init__(self, model: nn.Module, optimizer: Any, progress: Any) -> None:
        self.model, self.optimizer, self.progress = model, optimizer, progress
        self.commit()

    def commit(self) -> None:
        states = self.model.state_dict(), self.optimizer.state_dict(), self.progress
        self._kept = copy.deepcopy(states)

    def restore(self) -> None:
        model, optimizer, self.progress = copy.deepcopy(self._kept)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


def elastic_run(train: Callable[[ElasticState], Any]) -> Callable[[ElasticState], Any]:
    def trained(kept: ElasticState) -> Any:
        while True:
            try:
                return train(kept)
            except RankLostError:
                kept.restore()

    return trained


class HorovodRanks:
    """A job of which this process is rank 0. `groups`: the processes at each meeting, the last one for all
    that follow; `lost_in`: the collective in which a rank is lost, the first time that it is called."""

    def __init__(
        self, *groups: tuple[FrameworkWorker, ...], elastic: bool = False, lost_in: str = ""
    ) -> None:
        self._groups = list(groups or [(HERE,)])
        self._lost_in = lost_in
        self.size = len(self._groups[0])
        self.framework, self.is_chief, self.is_elastic = "horovod 0", True, elastic
        self.device, self.rank = torch.device("cpu"), 0
        self.agreed: dict[str, Any] = {}
        self.hvd = SimpleNamespace(
            Sum="sum",
            Min="min",
            allreduce=self._same("allreduce"),
            allreduce_async_=self._same("allreduce_async_"),
            synchronize=self._same("synchronize"),
            broadcast_object=self._same("broadcast_object"),
            broadcast_parameters=self._same("broadcast_parameters"),
            elastic=SimpleNamespace(TorchState=ElasticState, run=elastic_run),
        )

    def _same(self, name: str) -> Callable[..., Any]:
        def collective(value: Any, *_: Any, **__: Any) -> Any:
            if self._lost_in == name:
                self._lost_in = ""
                raise RankLostError
            return value

        return collective

    def workers(self) -> list[FrameworkWorker]:
        group = self._groups.pop(0) if len(self._groups) > 1 else self._groups[0]
        self.size = len(group)
        return list(group)

    def agree(self, what: Any) -> None:
        self.agreed = dict(what)

    def decided_by_chief(self, decide: Callable[[], Any]) -> Any:
        return decide()


class Unsized:
    """Batches without a length, which begin anew every time."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def pairs(count: int) -> list[Any]:
    numbers = torch.Generator().manual_seed(0)
    return [
        (torch.randn(2, 3, generator=numbers), torch.randn(2, 1, generator=numbers)) for _ in range(count)
    ]


def run_config(folder: Path, **more: Any) -> paceline.TrainConfig:
    return paceline.TrainConfig(**{"run_dir": str(folder), "mode": "fast", "epochs": 3, **more})


def horovod_state(rate: float = 0.5) -> HorovodState:
    model = nn.Linear(3, 1)
    return HorovodState(model, torch.optim.SGD(model.parameters(), rate), "linear")


def horovod_loop(
    job: HorovodRanks, state: HorovodState, config: paceline.TrainConfig, batches: Any, validation: Any = None
) -> HorovodLoop:
    ranks: Any = job
    return HorovodLoop(
        ranks,
        state,
        Objective(nn.MSELoss()),
        RankBatches(ranks, batches),
        None if validation is None else RankBatches(ranks, validation, "the validation data"),
        LoopSettings(config, commit_steps=10),
    )


class Numbers:
    """A tensor of TensorFlow's, or a value that a worker will have."""

    def __init__(self, *values: float) -> None:
        self.values = np.array(values)

    def numpy(self) -> Any:
        return self.values

    def fetch(self) -> Any:
        return self.values


def tensorflow_loop(
    config: paceline.TrainConfig, batches: int, served: Any = None, stops_at: int = 0
) -> TensorFlowLoop:
    """A loop over epochs of that many batches, whose number it does not know. With `served` they are handed
    out to workers of parameter servers; another worker is asked to stop in step `stops_at`."""
    steps = [0]

    def train(batch: int, asked: float) -> Numbers:
        steps[0] += 1
        return Numbers(1.0, 2.0, asked + (steps[0] == stops_at))

    coordinator = None
    if served is not None:
        coordinator = SimpleNamespace(schedule=lambda function, args: function(*args))
    job: Any = SimpleNamespace(
        group=StrategyGroup(None, None, 0, 1),
        tf=SimpleNamespace(constant=lambda value, kind: value, float64=None),
        framework="tensorflow 0",
        replicas=1,
        coordinator=coordinator,
        served=served,
        cluster=None,
    )
    functions: Any = SimpleNamespace(
        train=train,
        score=lambda batch: Numbers(1.0, 2.0),
        score_here=lambda batch: Numbers(1.0, 2.0),
        reset=lambda: None,
        metrics=dict,
    )
    state: Any = SimpleNamespace(
        weights=1,
        contents=lambda: ({"model/weight": torch.zeros(1)}, {}),
        hash=lambda: "the hash",
        model=SimpleNamespace(optimizer=SimpleNamespace(learning_rate=0.5)),
    )
    data: Any = SimpleNamespace(steps=None, batch=2, of_epoch=lambda epoch, done: iter(range(done, batches)))
    return TensorFlowLoop(job, functions, state, data, data, config, ())
