"""The overview of a run: figures from the journal alone, at any moment of it, and their drawing."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console
from tests.train.made_journals import MadeRun

from paceline.core import events
from paceline.monitor.live_view import event_text, live_view, sparkline, state_of, status_line
from paceline.monitor.run_overview import SHOWN_LOSSES, RunOverview


def overview(journal, **config):
    found = RunOverview(config)
    for event in journal:
        found.read(event)
    return found


def drawn(found, *, running=False, width=100):
    page = io.StringIO()
    Console(file=page, width=width).print(live_view(found, "run", running=running))
    return page.getvalue()


def commit(step, **more):
    fields = {"time": float(step), "epoch": 0, "loss": 1.0 / step, "samples": 10, "seconds": 0.5, **more}
    return events.StepCommitted(step=step, **fields)


STARTED = events.RunStarted(
    time=0.0, workers=2, shards=2, samples=25, definition={"global_batch": 10}, fingerprint={}
)


def test_a_finished_run():
    journal = MadeRun(5, trouble=0.4).run()
    found = overview(journal, epochs=4)
    assert (found.phase, found.is_over, found.step) == ("finished", True, 28)
    assert found.total_steps == 28
    assert found.loss == 1 / 28
    assert found.samples_per_second == pytest.approx(8 / 0.05, rel=0.3)
    assert found.failures == sum(
        isinstance(event, events.WorkerFailed) and event.cause not in ("preempted", "restart", "unattended")
        for event in journal
    )
    assert len(found.repair_seconds) == sum(isinstance(event, events.Repaired) for event in journal)
    assert {worker.condition for worker in found.workers} <= {"ended", "failed"}
    assert found.state_hash


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 400), st.integers(0, 3000), st.booleans(), st.integers(20, 160))
def test_any_moment_of_any_run_can_be_drawn(seed, length, running, width):
    found = overview(MadeRun(seed, trouble=0.5).run()[:length], epochs=4)
    text = drawn(found, running=running, width=width)
    assert all(len(line) <= width for line in text.splitlines())
    assert status_line(found, running=running).startswith(state_of(found, running=running))


@pytest.mark.parametrize(
    ("config", "samples", "definition", "total"),
    [
        ({"epochs": 2}, 25, {"global_batch": 10}, 6),
        ({"epochs": 2}, 25, {"global_batch": 10, "drop_last": True}, 4),
        ({"epochs": 2, "max_steps": 5}, 25, {"global_batch": 10}, 5),
        ({"max_steps": 5}, None, {"global_batch": 10}, 5),
        ({"epochs": 2}, None, {"global_batch": 10}, None),
        ({"epochs": 2}, 25, {"global_batch": 10, "dynamic_batch": {"max": 4}}, None),
        ({}, 25, {}, None),
    ],
)
def test_the_last_step_is_known_where_settings_and_data_say_so(config, samples, definition, total):
    started = events.RunStarted(
        time=0.0, workers=1, shards=1, samples=samples, definition=definition, fingerprint={}
    )
    assert overview([started], **config).total_steps == total


def test_a_resumed_run_continues_from_its_checkpoint():
    journal = [STARTED, *map(commit, range(1, 9))]
    ended = events.RunEnded(time=9.0, step=8, epoch=0, reason="SIGTERM", hash="h")
    found = overview([*journal, ended])
    assert (found.phase, found.reason) == ("stopped", "SIGTERM")
    resumed = events.RunResumed(time=10.0, version=1, step=3, epoch=0, workers=2)
    found = overview([*journal, ended, resumed])
    assert (found.phase, found.step, found.reason) == ("training", 3, "")
    assert found.losses == [1.0, 0.5, 1 / 3]
    assert math.isnan(found.loss)


def test_the_curve_of_a_long_run_stays_short():
    found = overview([STARTED])
    for step in range(1, 5 * SHOWN_LOSSES):
        found.read(commit(step, loss=float(step)))
    assert SHOWN_LOSSES // 2 <= len(found.losses) < SHOWN_LOSSES
    assert found.losses == sorted(found.losses)
    assert found.losses[0] < 10
    assert found.losses[-1] > 5 * SHOWN_LOSSES - 10


def test_speed_is_that_of_the_last_steps_without_the_first():
    found = overview([STARTED, commit(1, seconds=100.0)])
    assert found.samples_per_second == 0.1
    found.read(commit(2))
    assert found.samples_per_second == 20.0


def test_the_share_of_communication_is_that_of_the_steps_that_measured_it():
    found = overview([STARTED, commit(1)])
    assert found.communication_share is None
    assert "communication" not in drawn(found)
    for step in (2, 3):
        found.read(commit(step, comm_time=0.1))
    assert found.communication_share == pytest.approx(0.2)
    assert "communication 20%" in drawn(found)


def test_a_run_without_an_end_is_training_or_interrupted():
    found = overview([STARTED, commit(1)])
    assert state_of(found, running=True) == "training"
    assert state_of(found, running=False) == "interrupted"
    failed = overview([STARTED, events.RunFailed(time=1.0, step=0, reason="too few\nworkers")])
    assert state_of(failed, running=False) == "failed"
    assert "too few workers" in drawn(failed)


def test_a_curve_of_blocks():
    assert sparkline([1.0, 2.0, 3.0], 10) == "▁▅█"
    assert sparkline([1.0, math.nan, 1.0, math.inf], 10) == "▁▁"
    assert sparkline([], 10) == sparkline([math.nan], 10) == ""
    assert len(sparkline(range(1000), 48)) == 48


def test_events_are_one_line_without_control_characters():
    journal = MadeRun(5, trouble=0.4).run()
    verdict = events.Verdict(
        time=journal[-1].time,
        rank=1,
        host="h",
        pid=1,
        phase="",
        line="",
        waiting="",
        action="",
        text="a\n\x1b[2J",
    )
    happened = overview([*journal, verdict]).happened[-1]
    assert "\n" not in event_text(happened)
    assert "\x1b" not in event_text(happened)
