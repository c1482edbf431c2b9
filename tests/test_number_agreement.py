"""Counts agree with their nouns and verbs in errors and reports: "1 sample is", "2 samples are".

Each sentence is made by the code that shows it to users. `tests/cli/test_counts_in_sentences.py` has those of
commands.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, IterableDataset

import paceline
from paceline.checkpoint.compare import CheckpointDiff, TensorChange
from paceline.cli import checkpoint, simulate
from paceline.comm import benchmark, cost
from paceline.comm.collectives import arguments, data_movement
from paceline.comm.collectives.shard_sums import ShardOwnership
from paceline.comm.compression import cast_gradients, powersgd
from paceline.comm.context import DistributedContext
from paceline.comm.rendezvous import key_value_store
from paceline.comm.rendezvous.round import RendezvousRound
from paceline.comm.rendezvous.view_group import ViewGroup, ViewPeer, open_view
from paceline.control import liveness_lock
from paceline.core import shm_segment_layout, type_conversion
from paceline.core.errors import ConfigError, PacelineError, UsageError
from paceline.core.events import StepCommitted
from paceline.data import batch_plan, partition, permutation
from paceline.data.sampler import DistributedSampler
from paceline.data.sources import Stream, as_source
from paceline.elastic.simulation.campaign import run_schedules
from paceline.engines.local import fork_server, linux
from paceline.frontends import collective_functions, run_preparation
from paceline.frontends.orchestrator import synthetic_task
from paceline.frontends.spawn import spawn
from paceline.monitor import audit, report
from paceline.testing.gauntlet.plans import FaultPlan
from paceline.train.loop import evaluation, micro_batch_finder, worker_jobs
from paceline.train.loop.run_hooks import MicroBatch
from paceline.train.objective import Objective
from paceline.train.precision import LossScaler
from paceline.train.settings import conflicts
from paceline.train.settings.dynamic_batch import DynamicBatch, GradientNoise
from paceline.train.settings.schedule import EarlyStopper
from paceline.train.settings.train_config import EarlyStopping, LossScaling, TrainConfig
from paceline.train.state import optimizers
from paceline.train.state.run_folder import RunFolder
from paceline.train.step import misuse_guard
from paceline.train.step_info import StepInfo
from paceline.train.team import first_owners


class Short:
    """A dataset whose `__getitems__` returns nothing, whatever is asked for."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, number: int) -> int:
        return number

    def __getitems__(self, numbers: list[int]) -> list[int]:
        return []


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def takes_only_a_context(ctx: object) -> None: ...


def _stream(count: int) -> Stream:
    return Stream(lambda: iter(range(count)))


def _skip_beyond(count: int) -> None:
    long = _stream(count + 3)
    long.take(count + 2)
    _stream(count).load_state_dict(long.state_dict())


def _collate(count: int) -> None:
    def refuse(samples: list[int]) -> None:
        raise ValueError("no")

    source = as_source(DataLoader(Endless(), collate_fn=refuse))
    assert isinstance(source, Stream)
    source.batch(source.take(count))


def _consumed(count: int) -> None:
    sampler = DistributedSampler(range(count), num_replicas=1, rank=0)
    list(sampler)
    sampler.state_dict(consumed=count + 1)


def _segment(count: int) -> None:
    fd = shm_segment_layout.create_segment(count)
    try:
        shm_segment_layout.read_segment(fd, count + 1)
    finally:
        os.close(fd)


def _transfer(count: int) -> Any:
    return cast_gradients("fp16").open(torch.zeros(count), "g")


def _enter(world_size: int) -> None:
    store = HashStore()
    store.set("hello/0", json.dumps({"world_size": 5}))
    rendezvous = RendezvousRound(store, 1, world_size, 1e9, "here", labels=range(8))
    rendezvous.enter({"host": None, "pid": os.getpid()})


def _view(count: int) -> None:
    members = [ViewPeer(rank, 1, "h", "h", ("", 0)) for rank in range(count)]
    open_view(ViewGroup(1, count, members, b""), None)


def _store_keys(count: int) -> None:
    key_value_store.checked_keys([3] * count)


def _store_value(count: int) -> None:
    server = SimpleNamespace(_stored=0, _values={})
    key_value_store.StoreServer._store(cast("Any", server), "k" * count, b"x" * (1 << 21))


def _config(**given: Any) -> TrainConfig:
    return TrainConfig(**given)


def _warmup(count: int) -> None:
    config = _config(global_batch=1, workers=1, epochs=1, warmup_steps=count)
    conflicts.check(config, samples=count, validation=False)


def _too_few(count: int) -> None:
    config = _config(global_batch=64, workers=1, drop_last=True)
    conflicts.check(config, samples=count, validation=False)


def _first_batch(count: int) -> None:
    config = _config(dynamic_batch=DynamicBatch(8, 64), workers=2)
    conflicts.check(config, samples=count, validation=False)


def _unknown_end(count: int) -> None:
    dynamic = DynamicBatch(2, 2 if count == 1 else 4)
    config = _config(dynamic_batch=dynamic, workers=2, epochs=1, schedule="linear")
    conflicts.check(config, samples=2 * count, validation=False)


def _evaluate_every(count: int) -> None:
    config = _config(workers=1, evaluate_every=count)
    conflicts.check(config, samples=64, validation=False)


def _large_micro_batch(count: int) -> None:
    config = _config(workers=2, global_batch=2 * count, micro_batch=5)
    conflicts.check(config, samples=64, validation=False)


def _lacking(count: int) -> None:
    misuse_guard.check_applied(3, count, 0, 0)


def _scaler(count: int) -> None:
    LossScaler(LossScaling()).load_state_dict({"scale": 0.0, "good_steps": count})


def _noise(count: int) -> None:
    GradientNoise(DynamicBatch(8, 64)).observe([1.0] * count, [1] * (3 - count), 1.0)


def _weights(count: int) -> None:
    partition.DataPartitioner(5, count, [0.0] * count)


def _report(titles: int, journals: int) -> None:
    runs = cast("Any", [None] * (3 - max(titles, journals)))
    given = ["a"] * titles if titles else None
    report.write_report("never.html", runs, titles=given, journals=[None] * journals)


def _missing_shards(count: int) -> None:
    with DistributedContext(1, 0) as context:
        context.fold_partials([], ShardOwnership(count, ((),)), torch.zeros(3))


def _partials(count: int) -> None:
    shards = {1: (0, 2), 2: (0,)}[count]  # of 3: two nodes of the tree, or one
    with DistributedContext(1, 0) as context:
        context.fold_partials([torch.zeros(3)] * count, ShardOwnership(3, (shards,)), torch.zeros(3))


def _groups(count: int) -> None:
    model = nn.Linear(1, 1)
    apart: Any = [{"params": [parameter]} for parameter in model.parameters()]
    optimizer = torch.optim.SGD(apart if count == 1 else model.parameters(), 0.1)
    saved = {"type": "SGD", "groups": [{"params": [name]} for name in ("weight", "bias")[:count]]}
    optimizers.load([optimizer], model, [saved], {})


def _average(count: int) -> None:
    powersgd.average_together([torch.zeros(count)], lambda flat: torch.zeros(count + 1))


ERRORS: dict[str, tuple[Callable[[int], object], str, str]] = {
    "a batch of predictions": (
        lambda n: evaluation.per_sample(torch.tensor(1.0), n, "", set()),
        "for a batch of 1 sample: ",
        "for a batch of 2 samples: ",
    ),
    "samples lost in a sum": (_lacking, "step 3 has 1 sample, and", "step 3 has 2 samples, and"),
    "good steps": (_scaler, "after 1 good step cannot", "after 2 good steps cannot"),
    "square norms": (_noise, "1 square norm was given for 2 shards", "2 square norms were given for 1 shard"),
    "too few samples": (_too_few, "1 sample // global_batch=64", "2 samples // global_batch=64"),
    "the first batch": (_first_batch, "and 1 sample: the first batch", "and 2 samples: the first batch"),
    "steps of an unknown end": (
        _unknown_end,
        "x 2 samples are 1 step, because",
        "x 4 samples are 1 to 2 steps, because",
    ),
    "warm-up steps": (
        _warmup,
        "of 1 step (epochs=1 x 1 step, 1 sample by global_batch=1)",
        "of 2 steps (epochs=1 x 2 steps, 2 samples by global_batch=1)",
    ),
    "evaluations": (_evaluate_every, "evaluate_every=1 step, and", "evaluate_every=2 steps, and"),
    "a shard": (_large_micro_batch, "a shard holds 1 sample, so", "a shard holds 2 samples, so"),
    "in-memory data": (
        lambda n: as_source(torch.zeros(n, 1)).fetch(np.array([5])),
        "the data has 1 sample",
        "the data has 2 samples",
    ),
    "samples of a dataset": (
        lambda n: as_source(Short(4)).fetch(np.arange(n)),
        "was asked for 1 sample and gave 0",
        "was asked for 2 samples and gave 0",
    ),
    "samples of a stream": (_collate, "1 sample of", "2 samples of"),
    "a stream that ended": (_skip_beyond, "ended after 1 sample, before", "ended after 2 samples, before"),
    "an order": (
        lambda n: permutation.Permutation(n, 0, 0).at([7]),
        "in an order of 1 sample",
        "in an order of 2 samples",
    ),
    "a replica's share": (_consumed, "handed 1 of its 1 sample since", "handed 2 of its 2 samples since"),
    "shards": (lambda n: batch_plan.assign(n, 0), "1 shard for 0 workers", "2 shards for 0 workers"),
    "workers": (lambda n: batch_plan.assign(0, n), "0 shards for 1 worker", "0 shards for 2 workers"),
    "weights": (_weights, "for 1 rank", "for 2 ranks"),
    "a rank": (
        lambda n: arguments.check_rank("root_rank", 7, n),
        "root_rank=7 in a group of 1 rank",
        "root_rank=7 in a group of 2 ranks",
    ),
    "hosts": (lambda n: arguments.host_groups([[7]], n), "for 1 rank", "for 2 ranks"),
    "chunks": (
        lambda n: data_movement.chunks_of([0] * n, 3 - n, "scatter"),
        "a list of 1 chunk for 2 ranks",
        "a list of 2 chunks for 1 rank",
    ),
    "missing shards": (
        _missing_shards,
        "over 1 shard: no rank holds shard 0",
        "over 2 shards: no rank holds shards 0 and 1",
    ),
    "partials": (
        _partials,
        "1 partial ['float32[3]'] where 2 partials are due, of float32[3]",
        "2 partials ['float32[3]', 'float32[3]'] where 1 partial is due, of float32[3]",
    ),
    "a segment": (_segment, "made for 1 rank (", "made for 2 ranks ("),
    "a rendezvous": (_enter, "rank 1 expects 1 rank, rank 0 expects 5", "rank 1 expects 2 ranks, rank 0"),
    "a view": (_view, "in a view of 1 member", "in a view of 2 members"),
    "keys of the store": (_store_keys, "1 key, or some", "2 keys, or some"),
    "a value of the store": (_store_value, "a key of 1 character with", "a key of 2 characters with"),
    "an encoded segment": (
        lambda n: _transfer(n).encode(0, 9),
        "a transfer of 1 element was",
        "a transfer of 2 elements was",
    ),
    "encoded bytes": (
        lambda n: _transfer(n).decode(torch.zeros(9, dtype=torch.uint8), torch.zeros(n)),
        "2 bytes for 1 element, not 9",
        "4 bytes for 2 elements, not 9",
    ),
    "dimensions": (
        lambda n: cast_gradients("fp16").open(torch.zeros([1] * n, dtype=torch.int32), "g"),
        "with 1 dimension of torch.int32",
        "with 2 dimensions of torch.int32",
    ),
    "an average": (_average, "was given 1 element and", "was given 2 elements and"),
    "items": (
        lambda n: type_conversion.convert([1] * (3 - n), tuple[(int,) * n], "x"),  # type: ignore[misc]
        "of 1 item",
        "of 2 items",
    ),
    "arguments": (
        lambda n: spawn(takes_only_a_context, *(0,) * n, workers=1),
        "with the context and 1 argument: ",
        "with the context and 2 arguments: ",
    ),
    "parameter groups": (
        _groups,
        "1 parameter group, and 2 in this run",
        "2 parameter groups, and 1 in this run",
    ),
    "shards of a rank that is gone": (
        lambda n: first_owners([[0]], 1 + n, step=9),
        "shard 1 was left to a rank",
        "shards 1 and 2 were left to a rank",
    ),
    "schedules": (
        lambda n: run_schedules(n, n, 1, processes=0),
        "cannot simulate 1 schedule of 1 worker in 0 processes\n",
        "cannot simulate 2 schedules of 2 workers in 0 processes\n",
    ),
    "processes of a simulation": (
        lambda n: run_schedules(0, 1, 1, processes=n),
        "of 0 workers in 1 process\n",
        "of 0 workers in 2 processes\n",
    ),
    "titles": (lambda n: _report(n, 0), "1 title was given for 2 runs", "2 titles were given for 1 run"),
    "journals": (
        lambda n: _report(0, n),
        "1 journal was given for 2 runs",
        "2 journals were given for 1 run",
    ),
}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("what", ERRORS)
def test_an_error(what: str, number: int):
    make, one, two = ERRORS[what]
    expected = one if number == 1 else two
    with pytest.raises((PacelineError, ValueError, type_conversion.MismatchError)) as caught:
        make(number)
    assert expected in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(("outputs", "text"), [(0, "0 outputs for 1 rank"), (2, "2 outputs for 1 rank")])
def test_outputs_of_a_collective(outputs: int, text: str):
    with DistributedContext(1, 0) as context, pytest.raises(UsageError, match=text):
        collective_functions.all_gather([torch.empty(1)] * outputs, torch.empty(1), group=context)


@pytest.mark.parametrize(("number", "text"), [(1, "a micro-batch of 1 sample was"), (2, "of 2 samples was")])
def test_a_micro_batch_without_backward(number: int, text: str, tmp_path: Path):
    model = nn.Linear(1, 1)
    config = _config(workers=1, shards=1, global_batch=number, run_dir=tmp_path / "run")
    with (
        pytest.raises(UsageError, match=text),
        paceline.session(model, torch.optim.SGD(model.parameters(), 0.1), config) as run,
    ):
        for _ in run.microbatches((torch.zeros(4, 1), torch.zeros(4, 1))):
            pass


@pytest.mark.parametrize(
    ("size", "shards", "text"),
    [(5, 1, "= 1 sample, cut into 1 shard;"), (6, 2, "= 2 samples, cut into 2 shards;")],
)
def test_a_last_batch_that_is_too_small(size: int, shards: int, text: str):
    spec = SimpleNamespace(
        config=_config(global_batch=4, workers=1, shards=shards), data=SimpleNamespace(size=size)
    )
    assert text in worker_jobs.position_note(MicroBatch(None, 1, 0, StepInfo()), cast("Any", spec))


@pytest.mark.parametrize(
    ("batch", "shards", "text"),
    [(4, 4, "1 sample"), (8, 4, "2 samples"), (3, 4, "0 or 1 sample"), (5, 4, "1 or 2 samples")],
)
def test_the_sizes_of_shards(batch: int, shards: int, text: str):
    assert conflicts.shard_sizes(batch, shards) == text


@pytest.mark.parametrize(("number", "text"), [(1, "in 1 evaluation"), (2, "in 2 evaluations")])
def test_early_stopping(number: int, text: str):
    stopper = EarlyStopper(EarlyStopping(metric="loss", patience=number))
    reasons = [stopper.observe({"loss": 1.0}) for _ in range(number + 1)]
    assert str(reasons[-1]).endswith(text)


@pytest.mark.parametrize(("number", "text"), [(1, "1 sample of 2 fits into"), (2, "2 samples of 2 fit into")])
def test_the_micro_batch_that_was_found(number: int, text: str, monkeypatch, caplog):
    monkeypatch.setattr(micro_batch_finder, "find", lambda try_size, largest: number)
    caplog.set_level(logging.INFO)
    model = nn.Linear(1, 1)
    source = as_source((torch.zeros(2, 1), torch.zeros(2, 1)))
    config = _config(global_batch=2, shards=1, workers=1)
    objective = Objective(nn.MSELoss())
    cpu = torch.device("cpu")
    assert micro_batch_finder.find_for_run(config, model, model, objective, source, cpu) == number
    assert text in caplog.text


def test_representations():
    assert repr(partition.DataPartitioner(1, 1)).startswith("DataPartitioner(1 sample over 1")
    assert str(FaultPlan(1, (), ())) == "1 worker"
    assert str(FaultPlan(2, (), ())) == "2 workers"


@pytest.mark.parametrize(("number", "text"), [(1, "1 rank on 1 host:"), (2, "2 ranks on 2 hosts:")])
def test_the_reason_of_an_algorithm(number: int, text: str):
    choice = cost.decide(cost.Situation(8, number, number), {"ring": 1.0}, cost.LinkCosts())
    assert text in choice.reason


@pytest.mark.parametrize(("number", "text"), [(1, "for 1 rank:"), (2, "for 2 ranks:")])
def test_no_shared_memory(number: int, text: str, monkeypatch):
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shm_segment_layout, "memory_file", refuse)
    with pytest.raises(PacelineError, match=text):
        shm_segment_layout.create_segment(number)


@pytest.mark.parametrize(("number", "text"), [(1, "with 1 rank"), (2, "with 2 ranks")])
def test_the_source_of_measured_links(number: int, text: str, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(benchmark, "_ring_step", lambda ctx, nbytes: 1e-6)
    transport = SimpleNamespace(window=None, topology=SimpleNamespace(hosts=1))
    links = benchmark.calibrate(cast("Any", SimpleNamespace(world_size=number, transport=transport)))
    assert links.source == f"measured inside the host {text}"


@pytest.mark.parametrize(("number", "text"), [(1, "1 sample of 1 number"), (2, "2 samples of 2 numbers")])
def test_a_task_that_does_not_fit(number: int, text: str, monkeypatch):
    def refuse(*shape: int) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(ConfigError, match=f"no memory for {text}\n"):
        synthetic_task.make_task(number, number, 0)


@pytest.mark.parametrize(("number", "text"), [(1, "started 1 thread; a"), (2, "started 2 threads; a")])
def test_a_module_that_starts_threads(number: int, text: str, monkeypatch):
    monkeypatch.setattr(linux, "own_thread_count", lambda: 1 + number)
    with pytest.raises(UsageError, match=text):
        fork_server.preload_module("json")


@pytest.mark.parametrize(
    ("pids", "who", "asked", "end"),
    [
        ([12], "process 12 of an earlier start of this run still runs in", "it is asked", "end it ("),
        (
            [12, 13],
            "processes 12 and 13 of an earlier start of this run still run in",
            "they are",
            "end them (",
        ),
        ([], "run, perhaps on another host, still run in", "they are asked", "end them ("),
    ],
)
def test_processes_of_an_earlier_start(
    pids: list[int], who: str, asked: str, end: str, monkeypatch, caplog, tmp_path: Path
):
    def wait(folder: Path, seconds: float, on_wait: Callable[[list[int]], None]) -> list[int]:
        on_wait(pids)
        return pids

    monkeypatch.setattr(liveness_lock, "wait_until_free", wait)
    with pytest.raises(UsageError) as caught:
        run_preparation.wait_for_earlier_start(RunFolder(tmp_path), 1.0)
    assert who in caught.value.message
    assert caught.value.remedy.startswith(end)
    assert who in caplog.text
    assert asked in caplog.text


# reports of finished runs


def _step(**given: Any) -> StepCommitted:
    return StepCommitted(time=0.0, **{"step": 3, "epoch": 0, "loss": 1.0, "samples": 1, **given})


def _record(size: int, **definition: Any) -> Any:
    return SimpleNamespace(size=size, definition=definition, done_again=(), started=None)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "step 3 took 1 position and applied 1 sample, and 1 was reported as skipped"),
        (2, "step 3 took 2 positions and applied 2 samples, and 2 were reported as skipped"),
    ],
)
def test_an_audit_of_skipped_samples(number: int, text: str):
    wrong: list[str] = []
    skipped = dict.fromkeys(range(number), 0)
    audit.check_samples(_record(8), _step(samples=number, taken=number), skipped, wrong)
    assert wrong == [text]


@pytest.mark.parametrize(("number", "text"), [(1, "took 1 position from 0"), (2, "took 2 positions from 0")])
def test_an_audit_of_a_batch(number: int, text: str):
    wrong: list[str] = []
    audit.check_taken(_record(8, global_batch=4), _step(offset=0, taken=number), wrong)
    assert text in wrong[0]


@pytest.mark.parametrize(
    ("taken", "size", "text"),
    [
        (2, 1, "epoch 0 took 2 positions, and the data has 1 sample"),
        (3, 2, "epoch 0 took 3 positions, and the data has 2 samples"),
        (0, 1, "epoch 0 ended after 0 of 1 position"),
        (1, 2, "epoch 0 ended after 1 of 2 positions"),
    ],
)
def test_an_audit_of_an_epoch(taken: int, size: int, text: str):
    wrong: list[str] = []
    audit.check_end(_record(size), 0, taken, True, wrong)
    assert wrong == [text]


@pytest.mark.parametrize(
    ("offset", "text"), [(1, ": position 0 is in no step"), (2, ": positions 0 to 1 are in no step")]
)
def test_an_audit_of_positions(offset: int, text: str):
    wrong: list[str] = []
    audit.count_covered([_step(offset=offset, taken=1)], wrong)
    assert wrong[0].endswith(text)


@pytest.mark.parametrize(
    ("losses", "others", "text"),
    [
        ([0.5], [0.5], "the losses of the 1 step they share are equal"),
        ([0.5, 0.4], [0.5, 0.4], "the losses of all 2 steps they share are equal"),
        ([0.5], [0.4], "the losses of 0 of 1 step are equal"),
        ([0.5, 0.3], [0.5, 0.4], "the losses of 1 of 2 steps are equal"),
    ],
)
def test_a_report_of_equal_steps(losses: list[float], others: list[float], text: str):
    histories = [
        SimpleNamespace(steps=[SimpleNamespace(step=step, loss=loss) for step, loss in enumerate(values)])
        for values in (losses, others)
    ]
    assert text in report.equal_steps(cast("Any", histories))


@pytest.mark.parametrize(
    ("number", "texts"),
    [
        (1, ["1 element differs, by", "1 tensor is the same bits"]),
        (2, ["2 elements differ, by", "2 tensors are the same bits"]),
    ],
)
def test_a_comparison_of_checkpoints(number: int, texts: list[str], capsys):
    change = TensorChange("w", "float32[2]", "float32[2]", number, 0.5)
    checkpoint.print_difference(CheckpointDiff(1, 2, (), (), (change,), number, ()))
    shown = capsys.readouterr().out
    assert all(text in shown for text in texts)


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1 of 1 schedule, 6 a minute, 1 violation"), (2, "2 of 2 schedules, 6 a minute, 2 v")],
)
def test_the_progress_of_a_simulation(number: int, text: str, capsys):
    campaign = SimpleNamespace(seconds=1.0, schedules=number, per_minute=6.0, violations=number)
    simulate.CampaignProgress(number)(cast("Any", campaign))
    assert text in capsys.readouterr().err
