"""A step has one point of decision: whatever a member is doing when it is lost or cut off, the bits are those
of one process. Every point of a step at which a member talks to another is tried, on every rank."""

from __future__ import annotations

from itertools import islice
from typing import Any, Literal

import pytest
import torch
from tests.train.disturbed_steps import RANKS, Crew, Feature, alone_with, every_point
from torch import Tensor, nn

from paceline.train.settings.dynamic_batch import DynamicBatch
from paceline.train.settings.train_config import GradientCompression


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Synced(nn.Module):
    """Its passes meet twice in a step, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.SyncBatchNorm(6), nn.Tanh(), nn.Linear(6, 2))
        self.last = nn.SyncBatchNorm(2)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.inner(x))


class Sparse(Dense):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 5, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x + self.words((x[:, 0] > 0).long()))


class SparseOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 2, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return self.words((x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())


class TwoDtypes(Sparse):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2).double()

    def forward(self, x: Tensor) -> Any:
        return self.last(super().forward(x).double()).float()


class Wide(Sparse):
    """Too large for the slots of small messages: ranks write into each other's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 40_000)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.wide(x)[:, :2]


FEATURES = {
    "dense": Feature(Dense),
    "sparse": Feature(Sparse),
    "sync batch-norm": Feature(Synced, lockstep=True),
    "sparse only": Feature(SparseOnly),
    "two dtypes": Feature(TwoDtypes),
    "wide": Feature(Wide),
    "noise": Feature(Sparse, {"dynamic_batch": DynamicBatch(12, 48)}),
    "scaled": Feature(Sparse, scaled=True),
    "left out": Feature(Sparse, left_out=1),
    "backup": Feature(Sparse, backup=True),
    "backup, two dtypes": Feature(TwoDtypes, backup=True),
    "int8": Feature(Sparse, {"compression": GradientCompression(kind="int8")}),
    "top-k": Feature(Dense, {"compression": GradientCompression(kind="top-k", keep=0.2)}),
    "int4, scaled, two dtypes": Feature(
        TwoDtypes, {"compression": GradientCompression(kind="int4")}, scaled=True
    ),
    "fp16, no feedback": Feature(
        Sparse, {"compression": GradientCompression(kind="fp16", error_feedback=False)}
    ),
    "int8, scaled, a modifier that communicates": Feature(
        Dense, {"compression": GradientCompression(kind="int8")}, scaled=True, talks=True
    ),
}
OWING = [name for name in FEATURES if name.startswith(("int", "top-k"))]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["killed", "cut"])
@pytest.mark.parametrize("name", FEATURES)
def test_every_point_of_a_step(name: str, kind: Literal["killed", "cut"]) -> None:
    try_every_point(name, kind, 1)


@pytest.mark.parametrize("name", ["sparse", "backup"])
def test_every_point_of_the_first_step(name: str) -> None:
    """There ranks also agree on the names of metrics."""
    try_every_point(name, "cut", 0)


def try_every_point(name: str, kind: Literal["killed", "cut"], step: int) -> None:
    feature = FEATURES[name]
    expected = alone_with(feature)
    tried = 0
    # A step that computes its shards together has many more points: every fourth, others in each test.
    points = islice(
        every_point(feature, kind, step),
        int(feature.lockstep and kind == "cut"),
        None,
        4 if feature.lockstep else 1,
    )
    for fault in points:
        crew = Crew(feature, RANKS, (fault,)).train()
        assert crew.outcome == expected, fault
        if name not in OWING:
            assert not crew.restored, fault
        tried += 1
    assert tried >= RANKS * 4
