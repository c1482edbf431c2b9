"""Runs that could get in each other's way: one folder, one place for checkpoints, one piece of data."""

from __future__ import annotations

import copy
import dataclasses
import threading
import typing

import pytest
import torch
from tests.one_thread import one_thread as one_thread
from tests.train import small_run
from tests.train.small_run import build, data, fit, settings
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import paceline
from paceline.checkpoint.store import CheckpointStore
from paceline.core.errors import ConfigError, UsageError
from paceline.data.source_interface import SkippedSampleError
from paceline.train.callbacks import Observer
from paceline.train.settings.train_config import CheckpointConfig, DynamicBatch, TrainConfig
from paceline.train.state.run_lock import held

pytestmark = pytest.mark.usefixtures("one_thread")


def session(config: TrainConfig, source: typing.Any = None, steps: int | None = None) -> str:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with paceline.session(model, optimizer, config) as run:
        for micro in run.microbatches(data() if source is None else source):
            run.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
            if steps is not None and run.step >= steps:
                break
    return paceline.state_hash(model)


def one_epoch(folder, **changes) -> TrainConfig:
    return settings(folder, 1, epochs=1, **changes)


class Second(Observer):
    """While a run goes on, another one is started in its folder."""

    def __init__(self, start: typing.Callable[[], object]) -> None:
        self.start = start
        self.said: str = ""

    def on_step(self, record) -> None:
        if record.step == 2:
            with pytest.raises(UsageError) as caught:
                self.start()
            self.said = str(caught.value)


def test_a_run_that_goes_on_keeps_others_out_of_its_folder(tmp_path):
    folder = tmp_path / "run"
    alone = session(one_epoch(tmp_path / "alone"))
    second = Second(lambda: session(one_epoch(folder, resume="auto")))
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with paceline.session(model, optimizer, one_epoch(folder), callbacks=[second]) as run:
        for micro in run.microbatches(data()):
            run.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
    assert "is in use: process" in second.said
    assert paceline.state_hash(model) == alone
    steps = small_run.steps_of(folder)
    assert steps == sorted(set(steps))
    # It has ended: the next one may.
    session(one_epoch(folder, resume="auto"))


def test_a_second_fit_leaves_the_first_ones_request_to_stop_alone(tmp_path):
    folder = tmp_path / "run"
    fit(one_epoch(folder))
    stop = folder / "stop"
    with held(folder / "lock", "the folder"):
        stop.write_text("SIGTERM")
        with pytest.raises(UsageError, match="is in use: process"):
            fit(one_epoch(folder, resume="auto"))
        assert stop.exists()
    stop.unlink()
    assert fit(one_epoch(folder, resume="auto")).stopped is None


def test_a_lock_is_of_one_at_a_time_and_names_its_holder(tmp_path):
    file = tmp_path / "lock"
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with held(file, "it"):
            inside.set()
            leave.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(30)
    with pytest.raises(UsageError, match="it is in use: process"), held(file, "it"):
        pass
    leave.set()
    holder.join()
    with held(file, "it"):
        pass


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_a_new_run_does_not_begin_among_the_versions_of_another(tmp_path, kind):
    url = str(tmp_path / "shared") if kind == "folder" else f"memory://{tmp_path.name}"
    keeping = CheckpointConfig(url=url, every_steps=2, keep_last=2, keep_best=0)
    session(one_epoch(tmp_path / "a", checkpoint=keeping))
    before = [manifest.version for manifest in CheckpointStore(url).manifests()]
    with pytest.raises(ConfigError, match="already holds 2 versions of another run"):
        session(one_epoch(tmp_path / "b", checkpoint=keeping, seed=9))
    assert not (tmp_path / "b").exists()
    assert [manifest.version for manifest in CheckpointStore(url).manifests()] == before
    session(dataclasses.replace(one_epoch(tmp_path / "a", checkpoint=keeping), epochs=2, resume="auto"))
    marks = {manifest.info.run for manifest in CheckpointStore(url).manifests()}
    assert len(marks) == 1
    assert marks != {""}


def test_two_runs_do_not_save_to_one_folder_at_once(tmp_path):
    keeping = CheckpointConfig(url=str(tmp_path / "shared"))
    with (
        held(tmp_path / "shared" / ".run", "the place"),
        pytest.raises(UsageError, match=r"checkpoint\.url=.* is in use"),
    ):
        session(one_epoch(tmp_path / "a", checkpoint=keeping))


# settings of the first start


def test_fewer_workers_with_shards_left_open(tmp_path):
    folder = tmp_path / "run"
    config = dataclasses.replace(
        settings(folder, 2), shards=None, global_batch=32, dynamic_batch=DynamicBatch(8, 16), max_steps=2
    )
    first = fit(config)
    again = fit(dataclasses.replace(config, workers=1, max_steps=3, resume="auto"))
    assert (first.shards, again.shards) == (4, 4)
    assert again.steps[-1].step == 3


def test_a_fast_run_goes_on_with_another_number_of_workers(tmp_path):
    config = dataclasses.replace(settings(tmp_path / "run", 2), shards=None, mode="fast", max_steps=2)
    fit(config)
    assert fit(dataclasses.replace(config, workers=1, max_steps=4, resume="auto")).steps[-1].step == 4


def test_evaluate_has_the_shards_of_the_run(tmp_path):
    config = dataclasses.replace(settings(tmp_path / "run", 3), shards=None, epochs=1)
    trainer = small_run.trainer(config)
    history = trainer.fit(data(), data())
    said = history.evaluations[-1].metrics
    assert trainer.evaluate(data()) == said
    resuming = dataclasses.replace(config, workers=1, resume="auto")
    later = small_run.trainer(resuming, model=trainer.model)
    assert later.evaluate(data()) == said
    resumed = small_run.trainer(resuming)
    resumed.fit(data(), data())
    assert resumed.evaluate(data()) == said


@pytest.mark.parametrize("text", ["shards = = 3", 'shards = "many"', "shards = -1"])
def test_a_damaged_config_file_is_named(tmp_path, text):
    config = dataclasses.replace(one_epoch(tmp_path / "run"), shards=None)
    session(config)
    (tmp_path / "run" / "config.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.toml is damaged"):
        session(dataclasses.replace(config, resume="auto"))


# data


class Stateful(IterableDataset):
    """Remembers where it stands, also in the middle."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        while self.position < 20:
            self.position += 1
            yield torch.full((6,), float(self.position - 1)), (self.position - 1) % 3
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def test_one_stream_is_not_both_training_and_validation_data(tmp_path):
    trainer = small_run.trainer(one_epoch(tmp_path / "run"))
    stream = Stateful()
    with pytest.raises(UsageError, match="are the same Stateful"):
        trainer.fit(stream, stream)
    assert not (tmp_path / "run").exists()
    trainer.fit(stream, copy.deepcopy(stream))


def test_a_stream_that_was_left_halfway_goes_on_and_begins_anew_in_the_next_epoch(tmp_path):
    config = TrainConfig(
        shards=1,
        global_batch=4,
        epochs=3,
        threads=1,
        progress=False,
        checkpoint=CheckpointConfig(every_steps=1),
    )
    whole = session(dataclasses.replace(config, run_dir=str(tmp_path / "whole")), Stateful())
    stream = Stateful()
    parts = dataclasses.replace(config, run_dir=str(tmp_path / "parts"))
    session(parts, stream, steps=3)
    assert stream.position not in (0, 20)
    assert session(dataclasses.replace(parts, resume=2), stream) == whole


class Pair(typing.NamedTuple):
    x: Tensor
    y: typing.Any


class Pairs(IterableDataset):
    def __iter__(self):
        return (Pair(torch.full((6,), float(number)), number % 3) for number in range(24))


def by_name(model, batch):
    assert type(batch) is Pair
    return nn.functional.cross_entropy(model(batch.x), batch.y)


def test_named_tuples_of_a_stream_arrive_as_such_on_every_worker(tmp_path):
    hashes = set()
    for workers in (1, 2):
        trainer = small_run.trainer(
            dataclasses.replace(one_epoch(tmp_path / str(workers)), workers=workers), objective=by_name
        )
        hashes.add(trainer.fit(Pairs(), Pairs()).state_hash)
    assert len(hashes) == 1


class Gaps:
    """Sample 4 cannot be read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 4:
            raise SkippedSampleError("its checksum is wrong")
        return torch.full((6,), float(index)), index % 3


def test_predictions_are_never_shifted_against_the_data(tmp_path):
    trainer = small_run.trainer(settings(tmp_path / "run", 2, global_batch=4))
    with pytest.raises(UsageError, match="left out: 4; row n of the result"):
        trainer.predict(Gaps())
    assert set(trainer.evaluate(Gaps())) == {"loss", "accuracy"}


def test_an_optimizer_has_to_be_given():
    wrong: typing.Any
    for wrong in (None, [], [None]):
        with pytest.raises(UsageError, match="the optimizer is"):
            paceline.Trainer(build, nn.CrossEntropyLoss(), optimizer=wrong)


def predict_in_a_job(context: object) -> list[float]:
    torch.manual_seed(0)
    trainer = paceline.Trainer(
        build().eval(), nn.CrossEntropyLoss(), optimizer=small_run.adam, config=TrainConfig(threads=1)
    )
    sums: list[float] = trainer.predict(data()).sum(1).tolist()
    return sums


def test_every_rank_of_a_job_gets_the_predictions():
    first, second = paceline.spawn(predict_in_a_job, workers=2, threads=1)
    assert len(first) == 54
    assert first == second
