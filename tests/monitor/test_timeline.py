"""The workers' timeline: read from the journal alone, drawn at any size, whatever the journal says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st
from tests.monitor.report_pages import page, run
from tests.train.made_journals import MadeRun

from paceline.core import events
from paceline.core.errors import UsageError
from paceline.core.journal import Journal
from paceline.monitor.report import write_report
from paceline.monitor.timeline import timeline
from paceline.monitor.timeline_chart import incarnations, timeline_chart

HERE = {"host": "here"}


def view(time, generation, members, step=0):
    ranks, pids = zip(*members, strict=True)
    return events.ViewChanged(
        time=time, generation=generation, reason="", members=[*ranks], shards=[[] for _ in ranks],
        pids=[*pids], hosts=["here"] * len(ranks), step=step,
    )  # fmt: skip


def started(time, rank, pid):
    return events.WorkerStarted(time=time, rank=rank, pid=pid, **HERE)


def failed(time, rank, pid, cause="crash"):
    return events.WorkerFailed(
        time=time, rank=rank, pid=pid, phase="collective", reason="killed", cause=cause, **HERE
    )


def repaired_run() -> list[events.Event]:
    """Two workers; the second dies, is replaced, and a third one joins."""
    return [
        events.SupervisorStarted(time=90.0, pid=1, attempt=1, address=""),
        started(100.0, 0, 10),
        started(100.5, 1, 11),
        view(101.0, 1, [(0, 10), (1, 11)]),
        events.StepCommitted(time=104.0, step=7, epoch=0, loss=1.0, samples=1),
        failed(105.0, 1, 11),
        view(105.1, 2, [(0, 10)], 7),
        events.Repaired(time=105.2, generation=2, seconds=0.2, lost=[1]),
        started(105.5, 1, 12),
        view(106.0, 3, [(0, 10), (1, 12)], 9),
        started(107.0, 2, 13),
        view(107.5, 4, [(0, 10), (1, 12), (2, 13)], 12),
        events.CheckpointSaved(time=108.0, version=1, step=13, bytes=1, stall=0.0, seconds=0.1),
        view(109.0, 5, [(1, 12), (2, 13)], 15),
        events.RunEnded(time=110.0, step=20, epoch=0, reason="finished", hash=""),
    ]


def test_lives_and_happenings():
    made = timeline(repaired_run())
    assert made.seconds == pytest.approx(10.0)  # from the first worker on, not from the supervisor on
    lives = [
        (one.rank, one.pid, one.incarnation, one.start, one.joined, one.end, one.cause)
        for one in made.lifetimes
    ]
    assert lives == [
        (0, 10, 0, 0.0, 1.0, 9.0, ""),
        (1, 11, 0, 0.5, 1.0, 5.0, "crash"),
        (1, 12, 1, 5.5, 6.0, 10.0, ""),
        (2, 13, 0, 7.0, 7.5, 10.0, ""),
    ]
    told = [(one.kind, one.time, one.text) for one in made.events]
    assert told == [
        ("supervisor", 0.0, "the supervisor starts (pid 1)"),
        ("failed", 5.0, "rank 1 (pid 11) fails in collective after step 7: killed"),
        ("repaired", pytest.approx(5.2), "repaired in 200 ms without rank 1"),
        ("joined", 6.0, "rank 1 is replaced (pid 12) after step 9"),
        ("joined", 7.5, "rank 2 joins (pid 13) after step 12"),
        ("checkpoint", 8.0, "checkpoint 1 of step 13 is durable"),
        ("left", 9.0, "rank 0 leaves after step 15"),
        ("ended", 10.0, "step 20: finished"),
    ]
    assert made.events[2].since == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("lost", "text"), [([], ""), ([1], " without rank 1"), ([2, 1], " without ranks 1 and 2")]
)
def test_the_ranks_that_a_repair_left_out(lost, text):
    made = timeline([events.Repaired(time=105.2, generation=2, seconds=0.2, lost=lost)])
    assert [one.text for one in made.events] == [f"repaired in 200 ms{text}"]


def test_who_was_asked_to_go_did_not_fail():
    journal = [*repaired_run()[:5], failed(105.0, 1, 11, cause="preempted"), view(105.1, 2, [(0, 10)], 7)]
    made = timeline(journal)
    assert [one.kind for one in made.events] == ["supervisor", "left"]
    assert (made.lifetimes[1].end, made.lifetimes[1].cause) == (5.0, "")


def test_time_in_which_no_worker_ran_is_cut_out():
    journal = [
        *repaired_run()[:5],
        events.SupervisorStarted(time=9000.0, pid=2, attempt=1, address=""),
        started(9010.0, 0, 20),
        view(9011.0, 1, [(0, 20)]),
        events.RunResumed(time=9011.0, version=1, step=7, epoch=0, workers=1),
        events.SupervisorStarted(time=9012.0, pid=3, attempt=2, address=""),
        events.RunEnded(time=9015.0, step=20, epoch=0, reason="finished", hash=""),
    ]
    made = timeline(journal)
    assert made.seconds == pytest.approx(9.0)
    assert made.starts == [4.0]
    assert [(one.pid, one.end) for one in made.lifetimes] == [(10, 4.0), (11, 4.0), (20, 9.0)]
    assert "a new supervisor takes over (pid 3)" in [one.text for one in made.events]


def test_a_run_without_a_supervisor():
    journal = [
        started(5.0, 0, 1),
        started(5.0, 1, 2),
        events.StepCommitted(time=6.0, step=1, epoch=0, loss=1.0, samples=1),
        events.RunEnded(time=7.0, step=1, epoch=0, reason="finished", hash=""),
    ]
    made = timeline(journal)
    assert [(one.start, one.end) for one in made.lifetimes] == [(0.0, 2.0), (0.0, 2.0)]
    assert chart(made).count('class="bar') == 2


def chart(made, width=1040) -> str:
    text = timeline_chart(made, width=width)
    assert "nan" not in text
    ElementTree.fromstring(text)
    return text


def test_every_bar_and_mark_is_drawn_with_a_title():
    text = chart(timeline(repaired_run()))
    assert text.count('class="bar') == 4
    assert text.count('class="waits') == 4
    assert text.count('<g class="failed">') == 1
    assert text.count('class="repair"') == text.count('class="supervisor"') == 1
    assert text.count('class="joined"') == 2
    assert '<text class="cause"' in text
    assert "rank 1, pid 11 on here: 0.50 s to 5.00 s, member from 1.00 s on; crash: killed" in text
    assert incarnations(timeline(repaired_run())) == [(0, "first process"), (1, "1st replacement")]


@pytest.mark.parametrize("workers", [1, 2, 8, 33, 128, 300])
def test_any_number_of_workers_fits_on_a_page(workers):
    made = timeline(
        [
            *(started(0.0, rank, rank + 1) for rank in range(workers)),
            view(1.0, 1, [(rank, rank + 1) for rank in range(workers)]),
            failed(3.0, workers - 1, workers),
            events.RunEnded(time=9.0, step=1, epoch=0, reason="finished", hash=""),
        ]
    )
    text = chart(made)
    (height,) = re.findall(r'viewBox="0 0 1040 (\d+)"', text)
    assert float(height) < 1000
    assert text.count('class="bar') == workers
    names = [float(y) for y in re.findall(r'<text class="tick" x="66" y="([\d.]+)"', text)]
    assert all(b - a >= 12.0 for a, b in pairwise(names) if b > a)


@given(st.integers(0, 500), st.floats(0.0, 0.5), st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_the_journal_says_it_is_drawn(seed, trouble, rng, shuffled):
    journal = MadeRun(seed, trouble=trouble, epochs=2).run()
    if shuffled:
        rng.shuffle(journal)
    made = timeline(journal)
    assert all(0.0 <= life.start <= (life.end or 0.0) <= made.seconds for life in made.lifetimes)
    chart(made)


def test_what_people_wrote_is_escaped():
    text = chart(timeline([*repaired_run()[:5], failed(105.0, 1, 11, cause="<b>&")]))
    assert "&lt;b&gt;&amp;" in text


def test_a_report_with_timelines(tmp_path):
    folder = tmp_path / "run"
    with Journal(folder / "journal.jsonl") as file:
        for event in repaired_run():
            file.append(event)
    path = write_report(
        tmp_path / "r.html", [run(2), run(2), run(1)], ["a", "b", "c"],
        journals=[folder, folder / "journal.jsonl", None],
    )  # fmt: skip
    text, checker = page(path)
    assert text.count('<svg class="timeline"') == 2
    assert "Workers of a" in checker.text
    assert "rank 1 is replaced (pid 12) after step 9" in checker.text
    path = write_report(tmp_path / "one.html", [run(2)], journals=[repaired_run()])
    assert "Workers" in page(path)[1].text
    with pytest.raises(UsageError, match="1 journal was given for 2 runs"):
        write_report(tmp_path / "r.html", [run(), run()], journals=[None])


def test_a_run_to_which_nothing_happened_has_no_list(tmp_path):
    calm = MadeRun(1, trouble=0.0).run()
    text, _ = page(write_report(tmp_path / "r.html", [run(4)], journals=[calm]))
    assert 'class="happened"' not in text
    busy = MadeRun(2, trouble=0.5, epochs=20).run()
    text, checker = page(write_report(tmp_path / "r.html", [run(4)], journals=[busy]))
    assert text.count("<li>") == 25
    assert "then" in checker.text


def test_nothing_to_draw():
    assert "no worker was recorded" in timeline_chart(timeline([]), width=100)
