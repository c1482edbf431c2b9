"""Sentences that people read agree in number and tense, for one worker and for several."""

from __future__ import annotations

import pytest
from tests.elastic.machine.machine_driver import (
    Driven,
    asked,
    beat_of,
    finish_of,
    hello_of,
    installed_by,
    leave_of,
    only,
    report_of,
)

from paceline.core.wording import counted, ranks
from paceline.elastic.machine import machine
from paceline.elastic.machine.actions import EndJob, RecordVerdict
from paceline.elastic.machine.job_event_handlers import size_refusal
from paceline.elastic.machine.machine_events import (
    AgentJoined,
    ProcessProbed,
    ScaleRequested,
    Tick,
    WorkerLost,
)
from paceline.elastic.machine.state import WorkerStatus


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        ([], "no rank leaves"),
        ([3], "rank 3 leaves"),
        ([2, 1], "ranks 1 and 2 leave"),
        ([5, 1, 2], "ranks 1, 2 and 5 leave"),
        (range(64), "ranks 0, 1, 2 and 61 others leave"),
    ],
)
def test_ranks_and_their_verb(slots, text):
    assert ranks(slots, "leaves", "leave") == text
    assert ranks(slots) == text.rpartition(" ")[0]


def test_counts_and_their_verb():
    assert [counted(n, "worker", "is", "are") for n in (0, 1, 2)] == [
        "0 workers are",
        "1 worker is",
        "2 workers are",
    ]
    assert [counted(n, "report") for n in (1, 3)] == ["1 report", "3 reports"]


@pytest.mark.parametrize(
    ("gone", "text"), [(1, "rank 3 leaves"), (2, "ranks 2 and 3 leave"), (3, "ranks 1, 2 and 3 leave")]
)
def test_members_that_leave(gone, text):
    job = Driven(4, 4).running()
    job.beat_all()
    told = job.tell(ScaleRequested(4 - gone))
    assert job.reason.startswith(f"fewer workers are wanted: {text}")
    told += job.wait(1.0)
    assert asked(told).reason == text


@pytest.mark.parametrize(
    ("come", "text"), [(1, "rank 2 joins"), (2, "ranks 2 and 3 join"), (3, "ranks 2, 3 and 4 join")]
)
def test_workers_that_join(come, text):
    job = Driven(2, 8).running()
    job.beat_all()
    job.tell(ScaleRequested(2 + come))
    number = "is" if come == 1 else "are"
    assert job.reason.endswith(f"{number} added")
    assert asked(job.join_all() + job.wait(1.0)).reason == text


@pytest.mark.parametrize(
    ("least", "lost", "text"),
    [
        (2, 2, "1 worker is left, at least 2 are required"),
        (3, 1, "2 workers are left, at least 3 are required"),
        (1, 3, "0 workers are left, at least 1 is required"),
    ],
)
def test_too_few_workers(least, lost, text):
    job = Driven(3, 6, min_workers=least, max_worker_failures=0).running()
    job.beat_all()
    for member in range(1, lost + 1):
        actions = job.tell(WorkerLost(member, "crash", "killed"))
    assert only(actions, EndJob).reason.startswith(text)


@pytest.mark.parametrize(
    ("stopped", "text"),
    [
        (None, "ranks 0 and 1 came to the end with the same weights"),
        ("ctrl-c", "ranks 0 and 1 came to the end with the same weights, stopped: ctrl-c"),
    ],
)
def test_the_end_of_a_run_and_what_stopped_it(stopped, text):
    job = Driven(2, 4).running()
    job.tell(finish_of(1, (9, 0, 0), "same", stopped))
    assert only(job.tell(finish_of(2, (9, 0, 0), "same", stopped)), EndJob).reason == text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (ProcessProbed(2, stopped=True), "rank 1 sends no heartbeat: its process is stopped"),
        (ProcessProbed(2, stopped=False, ran=0.1), "rank 1 sends no heartbeat, though its interpreter runs"),
        (ProcessProbed(2, stopped=False), "rank 1 sends no heartbeat, but its process runs"),
    ],
)
def test_what_is_found_out_about_a_process_that_does_not_beat(found, text):
    job = Driven(3, 6).running()
    job.beat_all()
    job.tell(found, after=1.5)
    assert job.reason.startswith(text)


@pytest.mark.parametrize("waiting", [1, 2, 3])
def test_a_rank_that_hangs_and_the_ranks_that_wait(waiting):
    job = Driven(waiting + 1, 8).running()
    job.beat_all()
    verdicts: list[RecordVerdict] = []
    for _ in range(60):
        job.now += 0.25
        lasted = job.now - 100.0
        for member in range(2, waiting + 2):
            job.tell(beat_of(member, "collective", lasted, (5, 0, 0), (1,), 0.01, 0.02))
        job.tell(beat_of(1, "forward", lasted, (5, 0, 0), (), 0.01, 0.02))
        verdicts += [action for action in job.tell(Tick()) if isinstance(action, RecordVerdict)]
        if verdicts:
            break
    (verdict,) = verdicts
    assert "it has been in forward for 5." in verdict.what
    expected = {1: "rank 1 waits for it", 2: "ranks 1 and 2 wait for it", 3: "ranks 1, 2 and 3 wait for it"}
    assert verdict.waiting == expected[waiting]


def test_a_rank_that_hangs_alone():
    job = Driven(1, 2).running()
    job.beat_all()
    verdicts: list[RecordVerdict] = []
    while not verdicts:
        job.now += 0.25
        job.tell(beat_of(1, "forward", job.now - 100.0, (5, 0, 0), (), 0.01, 0.02))
        verdicts += [action for action in job.tell(Tick()) if isinstance(action, RecordVerdict)]
    assert verdicts[0].waiting == "no other rank reports waiting for it"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_counts_on_the_way_to_a_view(workers):
    job = Driven(workers, 6)
    plural = "worker is" if workers == 1 else "workers are"
    assert job.reason.startswith(f"{workers} {plural} started")
    job.running()
    job.tell(leave_of(1, "SIGTERM"))
    if workers > 1:
        stops = "workers stop"
        assert f"{workers} {stops} after the next step" in job.reason
        job.tell(report_of(1, 2, (5, 0, 0)))
        left = workers - 1
        assert job.reason.endswith(f"{left} report{'' if left == 1 else 's'} missing")


@pytest.mark.parametrize("workers", [2, 3])
def test_counts_while_a_view_is_installed(workers):
    job = Driven(workers, 6)
    job.join_all()
    job.tell(installed_by(1, 1))
    left = workers - 1
    assert job.reason == f"{left} member{' has' if left == 1 else 's have'} not installed generation 1"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_counts_of_a_restart_and_of_an_agent(workers):
    job = Driven(workers, 6).running()
    again = Driven(workers, 6, machine.snapshot(job.state))
    members = "member is" if workers == 1 else "members are"
    assert again.reason == f"{workers} {members} expected back in generation 1"
    if workers > 1:
        again.tell(hello_of(1, 0, generation=1, progress=(5, 0, 0)))
        left = workers - 1
        assert again.reason.endswith(f"{left} member{' has' if left == 1 else 's have'} not come back")
    job.tell(AgentJoined(1, workers, "host1"))
    assert job.reason.startswith(f"host1 offers {workers} worker{'' if workers == 1 else 's'}:")


@pytest.mark.parametrize(
    ("settings", "workers", "text"),
    [
        ({}, 0, "0 workers are fewer than the 1 that is required"),
        ({"min_workers": 2}, 1, "1 worker is fewer than the 2 that are required"),
        ({"most_workers": 1}, 2, "2 workers are more than the 1 shard of a step"),
        ({"most_workers": 6}, 7, "7 workers are more than the 6 shards of a step"),
    ],
)
def test_a_size_that_is_refused(settings, workers, text):
    assert (size_refusal(Driven(2, 6, **settings).state, workers) or "").startswith(text)


def test_workers_that_wait_for_others():
    job = Driven(2, 8).running()
    job.beat_all()
    job.tell(ScaleRequested(5))
    job.tell(hello_of(3, 2))
    assert job.reason.endswith("; rank 2 waits for others that were started too")
    job.tell(hello_of(4, 3))
    assert job.reason.endswith("; ranks 2 and 3 wait for others that were started too")


@pytest.mark.parametrize(
    ("slots", "text"), [([0], "rank 0 is started again"), ([0, 1], "ranks 0 and 1 are started again")]
)
def test_workers_that_are_started_again(slots, text):
    job = Driven(3, 6, backoff=1.0, jitter=0.0).running()
    job.beat_all()
    for slot in [*slots, *slots]:
        job.tell(WorkerLost(job.of_slot(slot), "crash", "killed"))
    job.form_view()
    assert text in _reasons(job, 2.0)


def _reasons(job: Driven, seconds: float) -> str:
    """All that is said about ticks while the members beat."""
    said = []
    for _ in range(int(seconds / 0.25)):
        for number in sorted(job.state.workers):
            if job.state.workers[number].status is not WorkerStatus.STARTING:
                job.tell(beat_of(number, "wait", 0.01, (5, 0, 0), (), 0.01, 0.02))
        job.tell(Tick(), after=0.25)
        said.append(job.reason)
    return "; ".join(said)
