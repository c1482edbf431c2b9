"""What the end of a run's process means."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.frontends.run_queue.queue_parts import request

from paceline.frontends.run_queue.queued_run import QueuedRun
from paceline.frontends.run_queue.run_endings import MAX_CRASHES, RunEnd, after_end


def a_run(**changes: object) -> QueuedRun:
    made = QueuedRun(
        id=7, request=request(Path("/place")), added=1.0, since=2.0, state="running", workers=2, attempt=1
    )
    return made if not changes else QueuedRun(**{**vars(made), **changes})


@pytest.mark.parametrize(
    ("run", "end", "state", "reason"),
    [
        (a_run(), RunEnd(code=0, step=9), "finished", ""),
        (a_run(state="stopping", intent="cancel"), RunEnd(code=0, step=9), "finished", ""),
        (
            a_run(),
            RunEnd(code=1, tail=("Traceback", "ValueError: no", "")),
            "failed",
            "exit code 1: ValueError: no",
        ),
        (a_run(), RunEnd(code=3), "failed", "exit code 3"),
        (
            a_run(state="stopping", reason="run 8 of priority 5 gets workers"),
            RunEnd(code=75, step=4),
            "waiting",
            "saved after step 4: run 8 of priority 5 gets workers",
        ),
        (
            a_run(state="stopping"),
            RunEnd(code=-15),
            "waiting",
            "stopped before its first step",
        ),
        (a_run(state="stopping"), RunEnd(code=1, tail=("disk full",)), "failed", "exit code 1: disk full"),
        (
            a_run(state="stopping", intent="hold"),
            RunEnd(code=75, step=4),
            "held",
            "saved after step 4",
        ),
        (a_run(state="stopping", intent="cancel"), RunEnd(code=75, step=4), "cancelled", "after step 4"),
        (a_run(state="stopping", intent="kill"), RunEnd(code=-9), "cancelled", "before its first step"),
        (
            a_run(),
            RunEnd(code=75, step=4, stop_reason="SIGTERM"),
            "waiting",
            "saved after step 4: SIGTERM",
        ),
        (
            a_run(),
            RunEnd(code=75, step=4, stop_reason="paceline stop"),
            "held",
            "saved after step 4: paceline stop; `paceline queue release 7` continues it",
        ),
        (
            a_run(),
            RunEnd(code=130, step=4),
            "held",
            "stopped after step 4: Ctrl-C; `paceline queue release 7` continues it",
        ),
        (
            a_run(),
            RunEnd(code=-9, step=4),
            "waiting",
            "killed by SIGKILL after step 4: started again at once",
        ),
        (
            a_run(),
            RunEnd(code=None, step=4, other_boot=True),
            "waiting",
            "the machine was started anew after step 4",
        ),
        (a_run(intent="hold"), RunEnd(code=-11), "held", "killed by SIGSEGV after step 0"),
    ],
)
def test_an_end(run, end, state, reason):
    after = after_end(run, end, 100.0)
    assert (after.state, after.reason) == (state, reason)
    assert after.since == 100.0
    assert after.workers == 0
    assert after.notes[-1].text.startswith(state)


def test_crashes_without_progress_are_counted_and_pause():
    run, pauses = a_run(), []
    for _ in range(MAX_CRASHES):
        run = after_end(run, RunEnd(code=None, step=0), 100.0)
        assert run.state == "waiting"
        pauses.append(run.not_before - 100.0)
        run = run.started(100.0, 1, "host")
    assert pauses == [0.0, 4.0, 16.0]
    run = after_end(run, RunEnd(code=None, step=0, tail=("last words",)), 100.0)
    assert run.state == "failed"
    assert run.reason == "its process is gone after step 0, 4 times without a step between them"
    assert run.tail == ("last words",)


def test_a_crash_after_progress_counts_as_the_first():
    run = a_run()
    for step in range(1, 3 * MAX_CRASHES):
        run = after_end(run, RunEnd(code=-9, step=step), 100.0)
        assert (run.state, run.crashes, run.not_before) == ("waiting", 1, 100.0)
        run = run.started(100.0, 1, "host")


def test_a_machine_that_is_started_anew_is_no_crash():
    run = a_run()
    for _ in range(3 * MAX_CRASHES):
        run = after_end(run, RunEnd(code=None, other_boot=True), 100.0)
        assert (run.state, run.crashes) == ("waiting", 0)
        run = run.started(100.0, 1, "host")


def test_old_notes_are_dropped():
    run = a_run()
    for number in range(50):
        run = run.noted(float(number), str(number))
    assert [note.text for note in run.notes] == [str(number) for number in range(30, 50)]
