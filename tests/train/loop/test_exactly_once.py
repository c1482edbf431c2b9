"""Figure 3: every sample of the dataset is applied exactly once per epoch, wherever the run stops and on
however many workers it goes on."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tests.train.running import Outcome, job, train
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.train.callbacks import Modifier
from paceline.train.history import StepRecord
from paceline.train.settings.train_config import CheckpointConfig


@dataclass
class Ledger:
    """Which samples the committed steps of all ranks applied, by epoch."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    applied: dict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))


class Bookkeeper(Modifier):
    """One rank's: what it saw counts once the step is committed. Asks for a stop while it computes the step
    after which the run is to stop."""

    def __init__(self, ledger: Ledger, first_step: int, stop_after: int | None, request: Path) -> None:
        self._ledger, self._stop_after, self._request = ledger, stop_after, request
        self._step = first_step
        self._seen: list[int] = []

    def change_batch(self, batch: Any) -> Any:
        self._seen += batch[1].flatten().int().tolist()
        if self._step + 1 == self._stop_after:
            self._request.touch()
        return batch

    def stop(self, record: StepRecord) -> str | None:
        self._step = record.step
        with self._ledger.lock:
            self._ledger.applied[record.epoch].update(self._seen)
        self._seen = []
        return None


def _bookkeepers(*given: Any) -> list[Bookkeeper]:
    return [Bookkeeper(*given)]


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([index / self.size]), torch.tensor([float(index)])


class NumberStream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = Numbers(self.size)
        return (numbers[index] for index in range(self.size))


class SavedNumberStream(NumberStream):
    """Knows where it stands, so a resumed run does not read the samples before."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.next = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = Numbers(self.size)
        while self.next < self.size:
            self.next += 1
            yield numbers[self.next - 1]
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def in_memory(size: int) -> tuple[Tensor, Tensor]:
    ids = torch.arange(size, dtype=torch.float32)[:, None]
    return ids / size, ids


def with_stops(
    make: Callable[[], Any], folder: Path, plan: list[tuple[int, int | None]], ledger: Ledger, **run: Any
) -> list[Outcome]:
    """Sessions of one run, each on so many workers until so many steps are committed in all."""
    outcomes: list[Outcome] = []
    request, done = folder.parent / "please", 0
    for workers, stop_after in plan:
        request.unlink(missing_ok=True)
        model = nn.Linear(1, 1)
        # A resumed run must not depend on what the module holds when it is handed over.
        model.load_state_dict({"weight": torch.full((1, 1), float(done)), "bias": torch.ones(1)})
        given = job(
            model,
            make(),
            optimizer=lambda p: torch.optim.SGD(p, 1e-5),
            run_dir=folder,
            resume="auto" if outcomes else None,
            checkpoint=CheckpointConfig(every_epochs=None),
            **run,
        )
        given = dataclasses.replace(given, stop_file=request)
        keep = partial(_bookkeepers, ledger, done, stop_after, request)
        outcomes.append(train(given, workers, keep))
        if outcomes[-1].history.stopped is None:
            break
        done = stop_after or 0
    return outcomes


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    size = draw(st.integers(1, 30))
    batch = draw(st.integers(1, 12))
    shards = draw(st.integers(1, min(6, batch)))
    largest = -(-batch // shards)
    workers = st.integers(1, min(4, shards))
    stops = sorted(draw(st.sets(st.integers(1, 20), max_size=2)))
    return {
        "size": size,
        "global_batch": batch,
        "shards": shards,
        "micro_batch": draw(st.none() | st.integers(1, largest)),
        "drop_last": draw(st.booleans()) and size >= batch,
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "epochs": draw(st.integers(1, 2)),
        "plan": [(draw(workers), stop) for stop in [*stops, None]],
    }


def expected_per_epoch(run: dict[str, Any]) -> int:
    size: int = run["size"]
    batch: int = run["global_batch"]
    return size // batch * batch if run["drop_last"] else size


@settings(max_examples=100, deadline=None, derandomize=True)
@given(runs())
def test_every_sample_once_per_epoch(run: dict[str, Any]) -> None:
    size, plan = run["size"], run["plan"]
    config = {key: value for key, value in run.items() if key not in ("size", "plan")}
    ledger, undisturbed = Ledger(), Ledger()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        sessions = with_stops(lambda: in_memory(size), Path(one) / "run", plan, ledger, **config)
        (alone,) = with_stops(
            lambda: in_memory(size), Path(other) / "run", [(1, None)], undisturbed, **config
        )
    assert set(ledger.applied) == set(range(run["epochs"]))
    for applied in ledger.applied.values():
        assert set(applied.values()) == {1}
        assert len(applied) == expected_per_epoch(run)
        assert set(applied) <= set(range(size))
    assert ledger.applied == undisturbed.applied
    assert sessions[-1].hash == alone.hash
    assert [r.samples for r in sessions[-1].history.epochs] == [expected_per_epoch(run)] * run["epochs"]
    assert sessions[-1].history.epochs[-1].loss == pytest.approx(alone.history.epochs[-1].loss)


KINDS: dict[str, Any] = {
    "dataset": Numbers,
    "loader with workers": lambda size: DataLoader(Numbers(size), batch_size=4, num_workers=2),
    "stream": NumberStream,
    "stream that can be saved": SavedNumberStream,
    "function": lambda size: lambda: iter(NumberStream(size)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_data(kind: str, tmp_path: Path) -> None:
    """Stopped in the first epoch, at the very end of it, and in the second."""
    size, config = 23, {"global_batch": 6, "shards": 3, "micro_batch": 1, "epochs": 2}
    ledger, undisturbed = Ledger(), Ledger()
    plan = [(2, 2), (1, 4), (3, 7), (2, None)]
    sessions = with_stops(lambda: KINDS[kind](size), tmp_path / "a", plan, ledger, **config)
    assert len(sessions) == 4
    everything = Counter(range(size))
    assert ledger.applied == {0: everything, 1: everything}
    (alone,) = with_stops(lambda: KINDS[kind](size), tmp_path / "b", [(1, None)], undisturbed, **config)
    assert sessions[-1].hash == alone.hash


def test_a_short_last_batch_of_a_stream_can_be_dropped(tmp_path: Path) -> None:
    ledger = Ledger()
    config = {"global_batch": 6, "shards": 3, "drop_last": True, "epochs": 2}
    with_stops(lambda: NumberStream(23), tmp_path / "run", [(2, 4), (3, None)], ledger, **config)
    assert ledger.applied == {0: Counter(range(18)), 1: Counter(range(18))}
