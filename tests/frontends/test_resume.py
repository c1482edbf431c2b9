"""Runs that are taken up again: finished, longer, from a tag, from a version, past a damaged checkpoint."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from tests.checkpoint.future_versions import from_the_future
from tests.train import small_run
from tests.train.small_run import EPOCHS, STEPS, fit, journal_of, settings, steps_of

import paceline
from paceline.checkpoint.manifest import DamagedCheckpointError, UnreadableCheckpointError
from paceline.checkpoint.store import CheckpointStore
from paceline.core import config as core_config, events
from paceline.core.errors import ConfigError, UsageError
from paceline.train.callbacks import Modifier
from paceline.train.settings.fault_tolerance import FaultTolerance
from paceline.train.settings.train_config import CheckpointConfig, EarlyStopping, TrainConfig, to_toml


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """An undisturbed run, which kept all it saved."""
    folder = tmp_path_factory.mktemp("quiet") / "run"
    return folder, fit(settings(folder, 1, checkpoint=keeping())).state_hash


@pytest.fixture(scope="module")
def quiet(finished) -> str:
    return str(finished[1])


def keeping(**changes) -> CheckpointConfig:
    return CheckpointConfig(every_steps=4, keep_last=100, **changes)


def resumed(folder: Path) -> events.RunResumed:
    return [event for event in journal_of(folder) if isinstance(event, events.RunResumed)][-1]


def test_a_finished_run_is_not_trained_again(tmp_path, quiet):
    folder = tmp_path / "run"
    first = fit(settings(folder, 2))
    before = journal_of(folder)
    versions = [manifest.version for manifest in CheckpointStore(folder / "checkpoints").manifests()]
    again = fit(settings(folder, 1, resume="auto"))
    assert again.state_hash == first.state_hash == quiet
    assert [manifest.version for manifest in CheckpointStore(folder / "checkpoints").manifests()] == versions
    # Nothing was computed: no step, no evaluation, no save.
    new = journal_of(folder)[len(before) :]
    started = ["supervisor_started", "worker_started", "view_changed"]
    assert [event.type for event in new] == [*started, "run_resumed", "run_ended"]
    assert again.epochs == first.epochs
    assert again.evaluations == first.evaluations


def test_with_more_epochs(tmp_path, quiet):
    folder = tmp_path / "run"
    fit(settings(folder, 2, epochs=2))
    longer = fit(settings(folder, 3, resume="auto"))
    assert longer.state_hash == quiet
    # A history is of all starts of the run.
    assert [record.step for record in longer.steps] == list(range(1, STEPS + 1))
    assert [record.epoch for record in longer.epochs] == list(range(EPOCHS))
    assert all(record.samples == 54 for record in longer.epochs)


def test_with_more_steps_from_the_middle_of_an_epoch(tmp_path, quiet):
    folder = tmp_path / "run"
    patience = EarlyStopping(patience=EPOCHS)
    short = fit(settings(folder, 2, max_steps=7, early_stopping=patience))
    assert [(record.epoch, record.steps) for record in short.epochs] == [(0, 5), (1, 2)]
    assert [evaluation.step for evaluation in short.evaluations] == [5, 7]
    longer = fit(settings(folder, 1, resume="auto", early_stopping=patience))
    assert longer.state_hash == quiet
    assert [(record.epoch, record.steps) for record in longer.epochs] == [(n, 5) for n in range(EPOCHS)]


def test_evaluations_at_the_end_do_not_use_up_patience(tmp_path):
    """A run in pieces, each with an evaluation at its end, stops early where one without pieces does."""
    patience = EarlyStopping(metric="loss", mode="max", patience=3)
    whole = fit(settings(tmp_path / "whole", 1, early_stopping=patience))
    assert whole.stopped is not None
    folder = tmp_path / "run"
    for steps in (5, 7, 9, 10, None):
        pieces = fit(settings(folder, 1, early_stopping=patience, max_steps=steps, resume="auto"))
    assert (pieces.state_hash, pieces.stopped) == (whole.state_hash, whole.stopped)
    assert [record.epoch for record in pieces.epochs] == [record.epoch for record in whole.epochs]


def test_a_run_that_stopped_early_stays_over_until_there_is_more_patience(tmp_path, quiet):
    folder = tmp_path / "run"
    impatient = EarlyStopping(metric="loss", mode="max", patience=2)
    early = fit(settings(folder, 1, early_stopping=impatient))
    assert early.stopped is not None
    assert early.stopped.startswith("early stopping: loss")
    again = fit(settings(folder, 2, early_stopping=impatient, resume="auto"))
    assert (again.state_hash, again.stopped) == (early.state_hash, early.stopped)
    assert fit(settings(folder, 2, resume="auto")).state_hash == quiet


class StopsAt(Modifier):
    def __init__(self, step: int) -> None:
        self.step = step

    def stop(self, record) -> str | None:
        return "far enough" if record.step == self.step else None


def test_a_run_that_a_modifier_ended_stays_over_until_it_is_taken_away(tmp_path, quiet):
    folder = tmp_path / "run"
    ended = fit(settings(folder, 2), [StopsAt(8)])
    again = fit(settings(folder, 1, resume="auto"), [StopsAt(8)])
    assert again.stopped == ended.stopped == "StopsAt: far enough"
    assert steps_of(folder) == list(range(1, 9))
    assert fit(settings(folder, 1, resume="auto")).state_hash == quiet


def test_from_a_version_and_from_a_tag(tmp_path, quiet):
    folder = tmp_path / "run"
    fit(settings(folder, 2, epochs=3, checkpoint=keeping()))
    store = CheckpointStore(folder / "checkpoints")
    early = store.manifests()[0]
    assert early.info.step == 4
    assert fit(settings(folder, 1, resume=early.version, checkpoint=keeping())).state_hash == quiet
    assert (resumed(folder).version, resumed(folder).step) == (early.version, 4)
    # Steps after the event that stand above it in the journal are done again.
    assert steps_of(folder) == [*range(1, 16), *range(5, STEPS + 1)]

    store.tag(early.version, "early")
    assert fit(settings(folder, 3, resume="early", checkpoint=keeping())).state_hash == quiet
    assert resumed(folder).version == early.version
    newest = store.open()
    assert newest.manifest.info.step == STEPS
    lineage = {manifest.version: manifest.info.parent for manifest in store.manifests()}
    assert lineage[early.version] is None
    assert list(lineage.values()).count(early.version) >= 2


@pytest.mark.parametrize("which", ["nothing", 77])
def test_from_what_is_not_there(tmp_path, which):
    folder = tmp_path / "run"
    fit(settings(folder, 1, epochs=1))
    with pytest.raises(UsageError, match=f"there is no checkpoint '?{which}"):
        fit(settings(folder, 2, resume=which))


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, quiet, capfd):
    folder = tmp_path / "run"
    fit(settings(folder, 2, epochs=4))
    store = CheckpointStore(folder / "checkpoints")
    *_, before, newest = store.manifests()
    part = folder / "checkpoints" / f"v{newest.version:08d}" / newest.files[0].name
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    capfd.readouterr()
    assert fit(settings(folder, 3, resume="auto")).state_hash == quiet
    assert (resumed(folder).version, resumed(folder).step) == (before.version, before.info.step)
    # Once on the terminal, from the first rank, and in that rank's log.
    said = capfd.readouterr().err
    assert said.count(part.name) == 1
    damaged = f"v{newest.version:08d}/{part.name} is damaged: its {len(data)} bytes have checksum "
    assert f"checkpoints in {store.url}: {damaged}" in said
    assert part.name in (folder / "logs" / "rank-0.log").read_text()
    assert part.name not in (folder / "logs" / "rank-1.log").read_text()


def test_when_all_are_damaged_nothing_is_begun_anew(tmp_path):
    folder = tmp_path / "run"
    fit(settings(folder, 2, epochs=2))
    for state in (folder / "checkpoints").glob("*/state.json"):
        state.write_bytes(state.read_bytes()[:-10])
    with pytest.raises(DamagedCheckpointError, match=r"is damaged:\n.*state\.json is cut off") as caught:
        fit(settings(folder, 1, resume="auto"))
    assert [event.type for event in journal_of(folder)].count("run_started") == 1
    # Nor is it said that the next start would.
    assert "begins anew" not in "".join(caught.value.__notes__)


@pytest.mark.parametrize("lost", ["removed", "elsewhere"])
def test_a_run_that_has_saved_does_not_begin_anew_where_no_version_is(tmp_path, lost):
    """A disk that is not mounted, or another checkpoint.url: it began at step 1, without a word."""
    folder = tmp_path / "run"
    fit(settings(folder, 1, epochs=2))
    again = settings(folder, 1, resume="auto", epochs=3)
    if lost == "removed":
        (folder / "checkpoints").rename(tmp_path / "unmounted")
    else:
        empty = dataclasses.replace(again.checkpoint, url=str(tmp_path / "empty"))
        again = dataclasses.replace(again, checkpoint=empty)
    with pytest.raises(UsageError, match=r"says that version \d+ of step \d+ was saved, and .* no version"):
        fit(again)
    assert [event.type for event in journal_of(folder)].count("run_started") == 1
    if lost == "removed":
        (folder / "checkpoints").rmdir()
        (tmp_path / "unmounted").rename(folder / "checkpoints")
        assert fit(again).steps


@pytest.mark.parametrize("supervised", [True, False])
def test_versions_of_another_paceline_are_not_passed_over(tmp_path, supervised):
    folder = tmp_path / "run"
    fit(settings(folder, 2, epochs=2))
    versions = CheckpointStore(folder / "checkpoints").versions()
    for version in versions:
        from_the_future(folder / "checkpoints", version)
    with pytest.raises(UnreadableCheckpointError) as caught:
        fit(settings(folder, 1, resume="auto", fault_tolerance=FaultTolerance(enabled=supervised)))
    assert [item.version for item in caught.value.damage] == versions[::-1]
    assert [event.type for event in journal_of(folder)].count("run_started") == 1
    assert len(steps_of(folder)) == len(set(steps_of(folder)))
    # Nor does a new run begin among them.
    with pytest.raises(ConfigError, match=f"already holds {len(versions)} versions"):
        fit(settings(tmp_path / "new", 1, checkpoint=CheckpointConfig(url=str(folder / "checkpoints"))))


def test_checkpoints_elsewhere(tmp_path, quiet):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere" / "of this"
    there = CheckpointConfig(every_steps=4, url=str(elsewhere))
    fit(settings(folder, 2, epochs=2, checkpoint=there))
    assert not any((folder / "checkpoints").iterdir())
    assert fit(settings(folder, 1, checkpoint=there, resume="auto")).state_hash == quiet
    assert CheckpointStore(elsewhere).open().manifest.info.step == STEPS


def own_loop(config) -> str:
    model = small_run.build()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.linspace(-0.5, 0.5 + number, parameter.numel()).reshape(parameter.shape))
    with paceline.session(model, small_run.adam(model.parameters()), config) as run:
        for micro in run.microbatches(small_run.data()):
            run.backward(torch.nn.functional.cross_entropy(model(micro.x), micro.y))
    assert run.history is not None
    return run.history.state_hash


def test_checkpoints_in_memory(tmp_path):
    in_memory = CheckpointConfig(every_steps=4, url="memory://test_resume/run")
    whole = own_loop(settings(tmp_path / "whole", 1))
    folder = tmp_path / "run"
    own_loop(settings(folder, 1, epochs=3, checkpoint=in_memory))
    assert own_loop(settings(folder, 1, checkpoint=in_memory, resume="auto")) == whole
    assert resumed(folder).step == 15


def test_memory_of_workers_is_no_place_for_checkpoints(tmp_path):
    config = settings(tmp_path / "run", 1, checkpoint=CheckpointConfig(url="memory://nowhere"))
    with pytest.raises(ConfigError, match="which ends with them"):
        fit(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 6}, "seed: 5 -> 6"),
        ({"global_batch": 10}, "global_batch: 12 -> 10"),
        ({"shards": 3}, "shards: 4 -> 3"),
        ({"threads": 2}, "threads: 1 -> 2"),
    ],
)
def test_another_run_is_refused(finished, tmp_path, change, named):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    with pytest.raises(ConfigError, match=named):
        fit(settings(folder, 2, resume="auto", **change))


def test_other_data_is_refused(tmp_path):
    folder = tmp_path / "run"
    fit(settings(folder, 1, epochs=1))
    x, y = small_run.data()
    with pytest.raises(ConfigError, match="samples: 54 -> 53"):
        small_run.trainer(settings(folder, 1, resume="auto")).fit((x[1:], y[1:]))


def wider() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 17), torch.nn.ReLU(), torch.nn.Linear(17, 3))


def momentum(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def test_another_model_or_optimizer_is_refused(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    config = settings(folder, 2, resume="auto", epochs=EPOCHS + 1)
    with pytest.raises(UsageError, match=r"0\.weight|1\.weight"):
        fit(config, model=wider)
    other = paceline.Trainer(small_run.build, torch.nn.CrossEntropyLoss(), optimizer=momentum, config=config)
    with pytest.raises(UsageError, match="SGD"):
        other.fit(small_run.data(), small_run.data())


def test_a_folder_with_a_run_is_not_overwritten(finished):
    with pytest.raises(UsageError, match="already holds a run"):
        fit(settings(finished[0], 1))


def test_the_settings_read_back(finished):
    folder, _ = finished
    config = core_config.load(TrainConfig, folder / "config.toml")
    assert config == settings(folder, 1, checkpoint=keeping())
    assert to_toml(config) == (folder / "config.toml").read_text()


def test_a_later_start_takes_shards_and_threads_from_the_first(finished, tmp_path):
    folder = tmp_path / "run"
    fit(dataclasses.replace(settings(folder, 4), shards=None, threads=None, epochs=1))
    config = dataclasses.replace(settings(folder, 2), shards=None, threads=None, epochs=2, resume="auto")
    assert fit(config).shards == 4
