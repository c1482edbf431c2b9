"""How the recovery benchmarks read what they measure: logs of steps, kills in them, lines through samples."""

from __future__ import annotations

import os

import pytest
from bench.recovery import workload
from bench.recovery.kill_one import Plan, outcome
from bench.recovery.step_log import Line, StepLog, StepReader
from bench.recovery.vitals import Sample, slope

from paceline.core.errors import RankFailedError

FULL = workload.GLOBAL_BATCH


def line(step, time, *, pid=1, rank=0, group="a", samples=FULL):
    return Line(step, time, samples, pid, rank, group)


def test_a_group_that_goes_back_repeats_samples_and_is_past_the_kill_when_it_commits_a_new_step():
    lines = [
        *(line(step, float(step), pid=pid, rank=pid - 1) for step in range(1, 6) for pid in (1, 2)),
        line(6, 5.6, pid=1),  # was on its way when the other was killed
        *(
            line(step, 10.0 + step, pid=pid, rank=pid - 3, group="b")
            for step in range(4, 10)
            for pid in (3, 4)
        ),
    ]
    found = outcome(lines, killed=5.5, victim=2, steps=9, final="hash")
    assert found.seconds == 17.0 - 5.5
    assert found.repeated == 3 * FULL  # steps 4, 5 and 6
    assert found.lost == 0
    assert found.restarted == 1
    assert found.hash == "hash"


def test_samples_of_a_lost_replica_are_counted_as_lost_and_survivors_as_not_restarted():
    lines = [line(1, 1.0), line(1, 1.0, pid=2, rank=1), line(2, 3.0, group="b", samples=FULL - 64)]
    found = outcome(lines, killed=2.0, victim=2, steps=2, final=None)
    assert (found.seconds, found.repeated, found.lost, found.restarted) == (1.0, 0, 64, 0)


def test_a_run_that_never_goes_on_is_an_error():
    with pytest.raises(RankFailedError, match="no step after 2"):
        outcome([line(1, 1.0), line(2, 2.0)], killed=2.5, victim=1, steps=9, final=None)


def test_the_same_seed_gives_every_contender_the_same_kill():
    assert Plan.of(3, 400) == Plan.of(3, 400)
    assert {Plan.of(seed, 400).rank for seed in range(50)} == set(range(workload.WORKERS))


def test_the_log_reads_back_without_a_line_that_is_not_whole(tmp_path):
    log = StepLog(tmp_path, 2)
    log.committed(1, FULL, "a")
    log.committed(2, FULL, "a")
    log.close()
    reader = StepReader(tmp_path)
    (path,) = tmp_path.glob("steps-*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"step": 3')
    assert [(found.step, found.rank, found.pid) for found in reader.read()] == [
        (1, 2, os.getpid()),
        (2, 2, os.getpid()),
    ]
    assert len(reader.read()) == 2
    assert reader.final_hash() is None
    log.finish(2, "hash")
    assert reader.final_hash() == "hash"


def test_growth_is_the_slope_of_the_samples_that_have_the_value():
    def sample(seconds, events):
        return Sample(seconds, 0, None, None, None, 0, 0, events, 0)

    samples = [sample(second, 100 + 2 * second) for second in range(0, 60, 5)]
    assert slope(samples, lambda found: float(found.events)) == pytest.approx(120.0)
    assert slope(samples, lambda found: None) == 0.0


def test_the_parts_of_a_step_are_its_samples_and_every_epoch_has_another_order():
    batches = workload.Batches()
    whole = batches.take(7, 0, 1)[0]
    parts = [batches.take(7, part, 3)[0] for part in range(3)]
    assert sum(len(part) for part in parts) == len(whole) == FULL
    assert (whole[: len(parts[0])] == parts[0]).all()
    assert not (batches.take(7 + workload.STEPS_AN_EPOCH, 0, 1)[0] == whole).all()
