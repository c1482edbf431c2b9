"""What the loops of Horovod and TensorFlow decide by themselves: when a run ends and what its history says of
that, what becomes of a run whose ranks change, and what a second training starts from."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.frontends.framework_trainers.framework_stand_ins import (
    HERE,
    THERE,
    HorovodRanks,
    Unsized,
    horovod_loop,
    horovod_state,
    pairs,
    run_config,
    tensorflow_loop,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.core import events, journal
from paceline.core.errors import PeerLostError, UsageError
from paceline.frontends.framework_trainers.framework_ending import RunEnding
from paceline.frontends.framework_trainers.horovod_state import HorovodProgress, HorovodState
from paceline.train.stop_signals import Stopped

EVERY_STEP = paceline.CheckpointConfig(every_steps=1)
Train = Callable[[paceline.TrainConfig], paceline.History]


def by_horovod(batches: Any) -> Train:
    return lambda config: horovod_loop(HorovodRanks(), horovod_state(), config, batches, pairs(1)).run()


LOOPS: dict[str, Train] = {
    "horovod, a list": by_horovod(pairs(4)),
    "horovod, without a length": by_horovod(Unsized(pairs(4))),
    "tensorflow, in step": lambda config: tensorflow_loop(config, 4).run(),
    "tensorflow, handed out": lambda config: tensorflow_loop(config, 4, served_ranks([])).run(),
}


def served_ranks(told: list[str]) -> Any:
    return SimpleNamespace(
        fitting=lambda: told.append("fitting"),
        fitted=lambda: told.append("fitted"),
        take_lost=list,
        tell_when_over=lambda tell: None,
    )


def found(folder: Path, kind: type[Any]) -> list[Any]:
    return [event for event in journal.iterate(folder / "journal.jsonl") if isinstance(event, kind)]


@pytest.mark.parametrize("train", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(
    ("max_steps", "epochs", "evaluations"),
    [(4, 1, 1), (6, 1, 1), (12, 3, 3), (20, 3, 3)],  # at an epoch's end, inside of one, at the end, never
)
def test_max_steps_is_the_end_of_a_run(
    tmp_path: Path, train: Train, max_steps: int, epochs: int, evaluations: int
) -> None:
    history = train(run_config(tmp_path / "run", max_steps=max_steps))
    assert history.stopped is None
    assert [len(history.steps), len(history.epochs)] == [min(12, max_steps), epochs]
    assert len(history.evaluations) == evaluations
    assert found(tmp_path / "run", events.RunEnded)[0].reason == "finished"


@pytest.mark.parametrize(("stops_at", "epochs"), [(6, 1), (8, 1)])
def test_a_worker_that_is_to_stop_ends_all_after_its_step(tmp_path: Path, stops_at: int, epochs: int) -> None:
    """Also in the last step of an epoch: the resumed run makes the evaluation."""
    with pytest.raises(Stopped) as stopped:
        tensorflow_loop(run_config(tmp_path / "run"), 4, stops_at=stops_at).run()
    history = stopped.value.history
    assert [len(history.steps), len(history.epochs)] == [stops_at, epochs]
    assert found(tmp_path / "run", events.RunEnded)[0].reason == "a signal to another rank"


def test_a_signal_in_the_last_step_of_a_run_leaves_nothing_out(tmp_path: Path) -> None:
    """No resumed run would evaluate."""
    with pytest.raises(Stopped) as stopped:
        tensorflow_loop(run_config(tmp_path / "run", max_steps=8), 4, stops_at=8).run()
    history = stopped.value.history
    assert [len(history.steps), len(history.epochs), len(history.evaluations)] == [8, 2, 2]
    assert found(tmp_path / "run", events.RunEnded)[0].reason == "finished"


def test_a_run_that_is_stopped_is_saved_in_any_case(tmp_path: Path) -> None:
    never = paceline.CheckpointConfig(at_end=False, every_steps=100)
    with pytest.raises(Stopped):
        tensorflow_loop(run_config(tmp_path / "run", checkpoint=never), 4, stops_at=6).run()
    version = CheckpointStore(tmp_path / "run" / "checkpoints").newest_good()
    assert version is not None
    assert version.manifest.info.step == 6


def test_a_rank_goes_on_in_its_own_data_behind_what_it_has_trained_on(tmp_path: Path) -> None:
    """Stopped in step 6 of 4 an epoch, when ranks with larger batches had passed more samples together."""
    made, folder, seen = pairs(4), tmp_path / "run", list[Any]()
    whole = horovod_loop(HorovodRanks(), horovod_state(), run_config(tmp_path / "whole"), made).run()

    class Watched(Unsized):
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(super().__iter__()):
                seen.append(number)
                yield batch

    first = run_config(folder, checkpoint=EVERY_STEP, max_steps=6)
    horovod_loop(HorovodRanks((HERE, THERE)), horovod_state(), first, made).run()
    seen.clear()
    rest = run_config(folder, resume="auto", checkpoint=EVERY_STEP)
    history = horovod_loop(HorovodRanks((HERE, THERE)), horovod_state(), rest, Watched(made)).run()
    assert len(history.steps) == len(whole.steps) == 12
    assert history.steps[6].epoch == 1
    assert seen == [0, 1, 2, 3] * 2
    assert [record.samples for record in history.epochs] == [8, 8, 8]


def test_a_version_that_does_not_count_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier Paceline saved it: at an epoch's end nothing is missing, inside of one it is refused."""
    made, folder = pairs(4), tmp_path / "run"
    contents = HorovodState.contents

    def without_batches(self: HorovodState, progress: HorovodProgress) -> Any:
        tensors, state = contents(self, progress)
        del state["batches"]
        return tensors, state

    def trained(max_steps: int, **saves: Any) -> list[int]:
        config = run_config(folder, resume="auto", max_steps=max_steps, **saves)
        history = horovod_loop(HorovodRanks(), horovod_state(), config, made).run()
        return [record.step for record in history.steps]

    with monkeypatch.context() as earlier:
        earlier.setattr(HorovodState, "contents", without_batches)
        assert trained(4) == [1, 2, 3, 4]
        assert trained(6, checkpoint=EVERY_STEP) == [1, 2, 3, 4, 5, 6]
    versions = CheckpointStore(folder / "checkpoints").manifests()
    newest = versions[-1].version
    with pytest.raises(UsageError, match=f"version {newest} is from inside epoch 1 and does not say"):
        trained(8)
    for one in versions:
        if one.info.step > 4:
            shutil.rmtree(folder / "checkpoints" / f"v{one.version:08}")
    assert trained(8) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_signal_while_a_failed_run_is_closed_leaves_its_record_whole(tmp_path: Path) -> None:
    """A launcher asks the others to end when a rank is lost, which one may have noticed before."""
    elsewhere, closed = list[int](), list[str]()

    def close(error: BaseException) -> None:
        signal.raise_signal(signal.SIGTERM)
        closed.append(str(error))

    def train() -> paceline.History:
        raise PeerLostError("the last worker was lost")

    run: Any = SimpleNamespace(close=close)
    before = signal.signal(signal.SIGTERM, lambda number, frame: elsewhere.append(number))
    try:
        with pytest.raises(PeerLostError):
            RunEnding(run_config(tmp_path)).run(lambda: run, train)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert closed[0].startswith("the last worker was lost")
    assert elsewhere == []


def test_ranks_that_serve_are_told_of_every_training(tmp_path: Path) -> None:
    told: list[str] = []
    for name in ("first", "second"):
        tensorflow_loop(run_config(tmp_path / name, epochs=1), 2, served_ranks(told)).run()
    assert told == ["fitting", "fitted"] * 2


def drawing_state() -> HorovodState:
    """The same weights each time; what Dropout draws, and the noise of the data, is not seeded here."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    with torch.no_grad():
        for number, one in enumerate(model.parameters()):
            one.copy_(torch.linspace(-1, 1, one.numel()).view_as(one) + 0.1 * number)
    return HorovodState(model, torch.optim.SGD(model.parameters(), 0.001), "linear")


class NoisyRows(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> Any:
        return torch.full((3,), float(number)) + random.random() + torch.rand(3), torch.zeros(1)


class NoisyOrder:
    """Data of a rank's own, whose order is drawn with its first batch."""

    def __iter__(self) -> Iterator[Any]:
        for number in torch.randperm(4):
            yield torch.full((2, 3), float(number)) + torch.rand(2, 3), torch.zeros(2, 1)


@pytest.mark.parametrize("make", [lambda: DataLoader(NoisyRows(), batch_size=2), NoisyOrder])
@pytest.mark.parametrize("max_steps", [4, 5, 6, 8])
def test_a_resumed_run_draws_what_the_undisturbed_one_drew(
    tmp_path: Path, make: Callable[[], Any], max_steps: int
) -> None:
    torch.manual_seed(1)
    whole = horovod_loop(
        HorovodRanks(), drawing_state(), run_config(tmp_path / "whole"), make(), make()
    ).run()
    torch.manual_seed(1)
    begun = run_config(tmp_path / "run", max_steps=max_steps, checkpoint=EVERY_STEP)
    horovod_loop(HorovodRanks(), drawing_state(), begun, make(), make()).run()
    torch.manual_seed(2)
    rest = run_config(tmp_path / "run", resume="auto")
    resumed = horovod_loop(HorovodRanks(), drawing_state(), rest, make(), make()).run()
    assert resumed.state_hash == whole.state_hash
    assert [one.metrics for one in resumed.evaluations] == [one.metrics for one in whole.evaluations]


def test_ranks_and_trainings_draw_other_numbers(tmp_path: Path) -> None:
    torch.manual_seed(1)
    hashes = set()
    for number, rank in enumerate([0, 1, 1]):
        job = HorovodRanks()
        job.rank = rank
        config = run_config(tmp_path / str(number), epochs=1)
        history = horovod_loop(job, drawing_state(), config, pairs(4)).run()
        hashes.add(history.state_hash)
    assert len(hashes) == 3


def test_a_version_without_a_seed_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier Paceline saved it."""
    contents = HorovodState.contents

    def without_seed(self: HorovodState, progress: HorovodProgress) -> Any:
        tensors, state = contents(self, progress)
        del state["seed"]
        return tensors, state

    with monkeypatch.context() as earlier:
        earlier.setattr(HorovodState, "contents", without_seed)
        begun = run_config(tmp_path / "run", max_steps=4)
        horovod_loop(HorovodRanks(), horovod_state(), begun, pairs(4)).run()
    rest = run_config(tmp_path / "run", resume="auto")
    assert len(horovod_loop(HorovodRanks(), horovod_state(), rest, pairs(4)).run().steps) == 12


@pytest.mark.parametrize(
    ("validation", "kind"),
    [(None, "none"), (pairs(1), "given"), (Unsized(pairs(1)), "given, of unknown length")],
)
def test_ranks_agree_on_all_that_their_collectives_depend_on(
    tmp_path: Path, validation: Any, kind: str
) -> None:
    job = HorovodRanks()
    horovod_loop(job, horovod_state(), run_config(tmp_path, epochs=1), pairs(4), validation).run()
    assert job.agreed["validation data"] == kind
    assert job.agreed["optimizer"] == "SGD"
    assert {"gradient_accumulation_steps", "gradient_clipping", "commit_steps", "lr_rule", "compression"} <= {
        *job.agreed
    }


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("lost_in", ["broadcast_parameters", "synchronize"])
def test_a_rank_that_is_lost_before_the_first_commit(
    tmp_path: Path, lost_in: str, resume: str | None
) -> None:
    """In the meeting itself, and in the first step after it; of a fresh run, and of one that resumes."""
    folder, made = tmp_path / "run", pairs(4)
    if resume is not None:
        begun = run_config(folder, epochs=1)
        horovod_loop(HorovodRanks((HERE, THERE)), horovod_state(), begun, made).run()
    job = HorovodRanks((HERE, THERE), (HERE,), elastic=True, lost_in=lost_in)
    config = run_config(folder, epochs=2, resume=resume, checkpoint=EVERY_STEP)
    history = horovod_loop(job, horovod_state(), config, made).run()
    assert [record.step for record in history.steps] == list(range(1, 9))
    assert history.steps[-1].learning_rate == 0.5  # for one rank
    assert [record.samples for record in history.epochs] == [8, 8]
    (verdict,) = found(folder, events.Verdict)
    assert (verdict.rank, verdict.pid) == (THERE.rank, THERE.pid)
    assert len(found(folder, events.RunStarted)) == 1
    assert found(folder, events.RunResumed)[-1].step == (0 if resume is None else 4)
    assert found(folder, events.Repaired)[0].lost == [1]
    assert CheckpointStore(folder / "checkpoints").verify() == []


def test_a_rank_that_joins_is_no_repair(tmp_path: Path) -> None:
    """The first commit takes the ranks back to a meeting, at which there is one more."""
    folder, job = tmp_path / "run", HorovodRanks((HERE,), (HERE, THERE), elastic=True, lost_in="synchronize")
    history = horovod_loop(job, horovod_state(), run_config(folder), pairs(4)).run()
    assert (history.workers, history.steps[-1].learning_rate) == (2, 1.0)
    assert found(folder, events.Verdict) == found(folder, events.Repaired) == []
    assert [one.rank for one in found(folder, events.WorkerStarted)] == [0, 1]


def test_a_second_training_has_the_same_rate(tmp_path: Path) -> None:
    state, job = horovod_state(), HorovodRanks((HERE, THERE))
    for name in ("first", "second"):
        config = run_config(tmp_path / name, epochs=1, checkpoint=EVERY_STEP)
        history = horovod_loop(job, state, config, pairs(4)).run()
        assert {record.learning_rate for record in history.steps} == {1.0}
