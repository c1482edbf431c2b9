"""A shard computed again has the bits that the run recorded, from any checkpoint; what cannot is refused."""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.train.running import job, regression, seeded
from torch import nn

from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.core import events, journal
from paceline.core.errors import ConfigError, PlatformError, UsageError
from paceline.core.journal import Journal
from paceline.frontends.recomputation import read_record
from paceline.train.callbacks import Modifier, Observer
from paceline.train.loop import process_setup, recompute
from paceline.train.loop.finalize import conclude
from paceline.train.loop.run_builder import RunBuilder
from paceline.train.loop.worker_jobs import TrainJob, build, new_team, train_steps
from paceline.train.settings.train_config import CheckpointConfig
from paceline.train.state.model_state import state_hash
from paceline.train.step.transaction import StepTransaction
from paceline.train.stop_signals import StopRequest


class Keeps(Observer):
    """Writes the hashes of the shards into the journal, as a supervisor does from the workers' receipts."""

    transaction: StepTransaction

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step(self, record):
        with Journal(self.file) as file:
            for shard, digest in self.transaction.shard_hashes.items():
                file.append(
                    events.ShardHashed(time=time.time(), step=record.step, shard=shard, rank=0, hash=digest)
                )


class Doubles(Modifier):
    """Takes part in the computation; without it the replay would not have the same bits."""

    def change_batch(self, batch):
        return batch[0] * 2, batch[1]

    def change_gradients(self, parameters):
        for parameter in parameters.values():
            parameter.grad.mul_(0.9)


def replay_shard(made: TrainJob, folder: Path, step: int, shard: int) -> recompute.ReplayedShard:
    return recompute.replay_shard(made, folder, read_record(folder), step, shard)


def net() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    )


def trained(folder: Path, **given) -> TrainJob:
    """A run of 20 steps with every shard hashed; 44 samples, so that the last step of an epoch is short."""
    defaults = {
        "optimizer": lambda p: torch.optim.Adam(p, 1e-2),
        "epochs": 5,
        "audit_every": 1,
        "callbacks": [Doubles()],
        "checkpoint": CheckpointConfig(every_steps=7, every_epochs=None, keep_last=9),
    }
    given = {**defaults, **given}
    made = job(given.pop("model", net), regression(44), run_dir=folder, **given)
    keeps = Keeps(folder / "journal.jsonl")
    watched = dataclasses.replace(made, callbacks=[*made.callbacks, keeps])
    with ExitStack() as stack:
        context = stack.enter_context(DistributedContext(1, 0))
        stack.enter_context(process_setup.prepared(made.config))
        built = build(watched, stack, 0)
        builder = RunBuilder(new_team(context, made.config), built.spec, built.device, StopRequest())
        run = stack.enter_context(builder).run()
        keeps.transaction = run.parts.transaction
        train_steps(run, built)
        conclude(run, 0.0)
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, TrainJob]:
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, trained(folder)


def contents(folder: Path) -> dict[str, int]:
    """Every file and how long it is."""
    return {str(file): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("step", "shard", "version", "redone"),
    [(1, 0, None, 0), (5, 3, None, 4), (8, 0, 1, 0), (12, 5, 1, 4), (15, 2, 2, 0), (20, 5, 2, 5)],
)
def test_any_shard_has_its_bits(whole, step, shard, version, redone):
    folder, made = whole
    before = contents(folder)
    random = torch.get_rng_state()
    found = replay_shard(made, folder, step, shard)
    assert found.same is True
    assert found.hash == found.recorded
    assert (found.checkpoint, found.redone, found.strayed) == (version, redone, None)
    assert found.rank == 0
    assert contents(folder) == before
    assert torch.equal(torch.get_rng_state(), random)


def test_a_shard_that_needs_the_others_has_its_bits(tmp_path):
    """Its step is computed with all of its shards."""
    folder = tmp_path / "run"
    made = trained(folder, model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(net()))
    for step, shard in ((1, 0), (4, 5), (12, 3)):
        found = replay_shard(made, folder, step, shard)
        assert found.same is True
        assert found.strayed is None
    assert recompute.verify_run(made, folder, read_record(folder), 6).same


def test_a_shard_without_samples_and_one_with(whole):
    folder, made = whole
    empty = replay_shard(made, folder, 4, 5)  # 8 of 12 samples are left: the last shards have none
    assert empty.same is True
    assert empty.samples == ()
    assert math.isnan(empty.loss)
    filled = replay_shard(made, folder, 4, 0)
    assert len(filled.samples) == 2
    assert math.isfinite(filled.loss)
    assert filled.hash != empty.hash


def test_all_samples_of_a_step_are_named_once(whole):
    folder, made = whole
    named = [sample for shard in range(6) for sample in replay_shard(made, folder, 2, shard).samples]
    assert len(named) == len(set(named)) == 12


@pytest.mark.parametrize(
    "settings",
    [
        {"shards": 3, "micro_batch": 2, "epochs": 2},
        {"schedule": "cosine", "epochs": 2, "warmup_steps": 2},
        {"clip_norm": 0.1, "precision": "bf16", "epochs": 2},
        {"shards": 1, "epochs": 2},
        {"shuffle": False, "drop_last": True, "epochs": 2},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_whatever_the_settings(tmp_path, settings):
    folder = tmp_path / "run"
    checkpoint = CheckpointConfig(every_steps=2, every_epochs=None)
    made = trained(folder, checkpoint=checkpoint, callbacks=(), **settings)
    assert made.config.shards is not None
    assert replay_shard(made, folder, 6, made.config.shards - 1).same is True


def test_a_module_and_its_optimizer_stay_as_they_are(tmp_path):
    module = net()
    made = trained(tmp_path / "run", callbacks=(), epochs=1)
    mine = dataclasses.replace(made, model=module, optimizer=torch.optim.Adam(module.parameters(), 1e-2))
    before = state_hash(module)
    found = replay_shard(mine, tmp_path / "run", 3, 1)
    assert found.same is True
    assert state_hash(module) == before
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_script_that_changed_is_found_out(whole):
    folder, made = whole
    found = replay_shard(dataclasses.replace(made, objective=nn.functional.l1_loss), folder, 11, 5)
    assert found.same is False
    assert found.strayed == 8
    data = regression(44, seed=1)
    assert replay_shard(dataclasses.replace(made, train=data), folder, 2, 0).strayed == 1


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    folder = tmp_path / "run"
    made = trained(folder, epochs=4)
    (part,) = (folder / "checkpoints" / "v00000002").glob("part-*")
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    found = replay_shard(made, folder, 16, 1)
    assert (found.same, found.checkpoint, found.redone) == (True, 1, 8)
    assert "v00000002/part-00-of-01.safetensors is damaged" in caplog.text


def test_a_step_that_was_not_audited_has_no_hash_to_compare(tmp_path):
    made = trained(tmp_path / "run", audit_every=3, epochs=1)
    assert replay_shard(made, tmp_path / "run", 3, 1).same is True
    found = replay_shard(made, tmp_path / "run", 2, 1)
    assert found.recorded is None
    assert found.same is None


def test_what_cannot_be_replayed_is_refused(whole, tmp_path):
    folder, made = whole
    with pytest.raises(UsageError, match="step 21 is not in the run: its journal has steps 1 to 20"):
        replay_shard(made, folder, 21, 0)
    with pytest.raises(UsageError, match="step 0 is not in the run"):
        replay_shard(made, folder, 0, 0)
    with pytest.raises(UsageError, match="it has shards 0 to 5"):
        replay_shard(made, folder, 1, 6)
    other = dataclasses.replace(made, config=dataclasses.replace(made.config, seed=9, global_batch=24))
    with pytest.raises(ConfigError, match="global_batch: 12 -> 24; seed: 0 -> 9"):
        replay_shard(other, folder, 1, 0)
    with pytest.raises(ConfigError, match="samples: 44 -> 43"):
        replay_shard(dataclasses.replace(made, train=regression(43)), folder, 1, 0)
    fast = dataclasses.replace(made, config=dataclasses.replace(made.config, mode="fast"))
    with pytest.raises(UsageError, match="mode='fast'"):
        replay_shard(fast, folder, 1, 0)
    with pytest.raises(UsageError, match="is not the folder of a run"):
        replay_shard(made, tmp_path / "nothing", 1, 0)


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        x, y = regression(44)
        return iter(zip(x, y, strict=True))


def test_a_stream_is_refused(tmp_path):
    made = job(net, Numbers(), run_dir=tmp_path / "run", epochs=1)
    with Journal(tmp_path / "run" / "journal.jsonl") as file:
        file.append(
            events.RunStarted(time=0.0, workers=1, shards=6, samples=None, definition={}, fingerprint={})
        )
        file.append(events.StepCommitted(time=0.0, step=1, epoch=0, loss=1.0, samples=12))
    with pytest.raises(UsageError, match="a stream"):
        replay_shard(made, tmp_path / "run", 1, 0)


def test_another_machine_is_refused(tmp_path):
    folder = tmp_path / "run"
    made = trained(folder, epochs=1)
    lines = [
        dataclasses.replace(event, fingerprint={**event.fingerprint, "instructions": "AVX9000"})
        if isinstance(event, events.RunStarted)
        else event
        for event in journal.iterate(folder / "journal.jsonl")
    ]
    (folder / "journal.jsonl").unlink()
    with Journal(folder / "journal.jsonl") as file:
        for event in lines:
            file.append(event)
    with pytest.raises(PlatformError, match="bits may differ here: instructions was AVX9000"):
        replay_shard(made, folder, 1, 0)


def test_a_run_without_checkpoints_is_replayed_from_its_beginning(tmp_path):
    made = trained(tmp_path / "run", epochs=2, checkpoint=CheckpointConfig(enabled=False))
    found = replay_shard(made, tmp_path / "run", 7, 3)
    assert (found.same, found.checkpoint, found.redone) == (True, None, 6)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").manifests() == []
