"""Histories: the figures that follow from the records, and JSON there and back."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_type_hints

import pytest

from paceline.core import events
from paceline.core.errors import PlatformError, UsageError
from paceline.train.callbacks import SavedCheckpoint
from paceline.train.history import EpochRecord, Evaluation, History, StepRecord


def step(number, epoch, loss, samples=10, seconds=0.5, **more):
    more.setdefault("learning_rate", 0.1)  # NaN, the default, is unequal to itself
    return StepRecord(step=number, epoch=epoch, loss=loss, samples=samples, seconds=seconds, **more)


FULL = History(
    total_time=3.25,
    state_hash="ab" * 32,
    steps=(step(1, 0, 4.0), step(2, 0, 2.0, 5), step(3, 1, 1.0, grad_norm=0.1), step(4, 1, 0.1 + 0.2, 5)),
    epochs=(
        EpochRecord(epoch=0, steps=2, samples=15, loss=10 / 3, seconds=1.0, metrics={"accuracy": 0.1}),
        EpochRecord(epoch=1, steps=2, samples=15, loss=0.77, seconds=1.0, validation={"loss": 2.0}),
    ),
    evaluations=(
        Evaluation(step=2, epoch=0, metrics={"loss": 1.5, "accuracy": 0.75}, samples=9, seconds=0.1),
        Evaluation(step=4, epoch=1, metrics={"loss": 2.0, "accuracy": 0.5}, samples=9, seconds=0.1),
    ),
    workers=4,
    shards=8,
    run_dir="runs/x",
    stopped="a signal",
)


def test_figures_follow_from_the_records():
    assert FULL.final_loss == pytest.approx((10 * 1.0 + 5 * 0.3) / 15)
    assert FULL.best_accuracy == 0.75
    assert FULL.best_epoch == 0
    assert FULL.samples_per_second == pytest.approx(30 / 2.0)


def test_without_accuracy_the_lowest_loss_decides():
    losses = [
        Evaluation(step=n, epoch=n, metrics={"loss": v}) for n, v in enumerate([3.0, math.nan, 1.0, 2.0])
    ]
    history = History(total_time=1.0, state_hash="", evaluations=tuple(losses))
    assert history.best_accuracy is None
    assert history.best_epoch == 2
    trained = [EpochRecord(epoch=n, steps=1, samples=1, loss=v) for n, v in enumerate([3.0, 1.0, 2.0])]
    assert History(total_time=1.0, state_hash="", epochs=tuple(trained)).best_epoch == 1
    assert History(total_time=1.0, state_hash="", epochs=tuple(trained)).final_loss == 2.0


def test_the_best_accuracy_is_that_on_validation_data_alone():
    record = EpochRecord(epoch=0, steps=1, samples=1, loss=1.0, metrics={"accuracy": 0.99})
    assert History(total_time=1.0, state_hash="", epochs=(record,)).best_accuracy is None
    assert History(total_time=1.0, state_hash="", epochs=(record,)).best_epoch == 0


def test_its_repr_is_one_line_however_long_the_run_was():
    assert repr(FULL) == (
        "History(4 steps, 2 epochs, loss 0.7667, best accuracy 0.75, stopped: a signal, 3.2 s, 4 workers, "
        "runs/x)"
    )
    records = tuple(StepRecord(step=n, epoch=0, loss=0.5, samples=1) for n in range(1, 2001))
    plain = repr(History(total_time=0.0, state_hash="", steps=records))
    assert plain == "History(2,000 steps, 0 epochs, loss 0.5, 0.0 s, 1 worker)"


def test_a_run_without_a_step_has_no_figures():
    empty = History(total_time=0.0, state_hash="00")
    assert math.isnan(empty.final_loss)
    assert math.isnan(empty.samples_per_second)
    assert empty.best_epoch is None
    assert empty.to_dict()["best_accuracy"] is None


def test_json_there_and_back_is_equal_to_the_last_bit(tmp_path):
    path = FULL.save(tmp_path / "below" / "history.json")
    assert History.load(path) == FULL
    data = json.loads(path.read_text())
    assert data["final_loss"] == FULL.final_loss
    assert data["state_hash"] == "ab" * 32
    assert not list(path.parent.glob("*.tmp"))


def test_numbers_that_json_lacks_survive(tmp_path):
    odd = History(
        total_time=1.0,
        state_hash="",
        steps=(step(1, 0, math.inf, metrics={"x": -math.inf}), step(2, 0, math.nan)),
    )
    path = odd.save(tmp_path / "h.json")
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = History.load(path).steps
    assert (first.loss, first.metrics) == (math.inf, {"x": -math.inf})
    assert math.isnan(second.loss)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a history of format 1: found 'list'"),
        ('{"format": 99}', "found 99"),
        ('{"format": 1, "total_time": 1.0}', "state_hash is missing"),
        ('{"format": 1, "total_time": "x", "state_hash": ""}', "total_time: expected float"),
    ],
)
def test_what_is_not_a_history_is_refused(tmp_path, text, message):
    path = tmp_path / "h.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        History.load(path)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"none\.json cannot be read"):
        History.load(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="cannot be written"):
        FULL.save(tmp_path / "file" / "h.json")


def test_a_modifier_sees_no_time():
    record = step(1, 0, 1.0, learning_rate=0.1)
    assert record.seconds == 0.5
    assert record.timeless() == step(1, 0, 1.0, seconds=0.0, learning_rate=0.1)


def test_final_loss_of_an_epoch_that_was_stopped_and_partly_done_by_an_earlier_start():
    """The record of the epoch knows the steps that this start did not do."""
    step = StepRecord(step=7, epoch=1, loss=0.5, samples=10)
    unfinished = EpochRecord(epoch=1, steps=3, samples=30, loss=2.0)
    history = History(total_time=1.0, state_hash="", steps=(step,), unfinished=unfinished)
    assert history.final_loss == 2.0
    assert History.from_dict(history.to_dict()) == history


# Fields of a view whose default is not that of its event, with the reason.
OLD_LINES = (
    "lines from before the field was kept read as its default; a view that is made without it is unknown"
)
OPTIONAL = "every line has it; users may make a view without, for an observer of theirs"
OTHER_DEFAULTS = {
    (StepRecord, "learning_rate"): OLD_LINES,
    (SavedCheckpoint, "epoch"): OLD_LINES,
    (Evaluation, "samples"): OPTIONAL,
    (EpochRecord, "seconds"): OPTIONAL,
    (SavedCheckpoint, "bytes"): OPTIONAL,
    (SavedCheckpoint, "seconds"): OPTIONAL,
}
NOT_IN_THE_JOURNAL = {(SavedCheckpoint, "url")}


@pytest.mark.parametrize(
    ("view", "event"),
    [
        (StepRecord, events.StepCommitted),
        (Evaluation, events.Evaluated),
        (EpochRecord, events.EpochEnded),
        (SavedCheckpoint, events.CheckpointSaved),
    ],
)
def test_a_view_repeats_names_types_and_defaults_of_its_event(view: type[Any], event: type[Any]) -> None:
    types, fields = get_type_hints(event), {one.name: one for one in dataclasses.fields(event)}
    other = set()
    for one in dataclasses.fields(view):
        if (view, one.name) in NOT_IN_THE_JOURNAL:
            continue
        assert get_type_hints(view)[one.name] == types[one.name]
        same = fields[one.name]
        if (one.default, one.default_factory) != (same.default, same.default_factory):
            other.add((view, one.name))
    assert other == {key for key in OTHER_DEFAULTS if key[0] is view}
