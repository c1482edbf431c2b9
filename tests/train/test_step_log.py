"""Packed records of steps: what was put in comes out, bit for bit, in order, each step once."""

from __future__ import annotations

import math
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from paceline.train.history import StepLog, StepRecord

NUMBERS = st.floats(width=64)
TIMES = st.fixed_dictionaries(dict.fromkeys(("comm_time", "data_time", "compute_efficiency"), NUMBERS))


def record_of(times: dict[str, float], **fields: object) -> StepRecord:
    return StepRecord(**fields, **times)  # type: ignore[arg-type]


RECORDS = st.builds(
    record_of,
    times=st.just({}) | TIMES,
    step=st.integers(1, 30),
    epoch=st.integers(0, 2**40),
    loss=NUMBERS,
    samples=st.integers(0, 2**40),
    seconds=NUMBERS,
    learning_rate=NUMBERS,
    grad_norm=st.none() | NUMBERS,
    skipped=st.booleans(),
    metrics=st.dictionaries(st.sampled_from(["accuracy", "f1"]), NUMBERS),
)


def text(record: StepRecord) -> str:
    """NaN is not equal to itself; its text is."""
    return repr(record)


@given(st.lists(RECORDS))
def test_the_newest_record_of_each_step_in_order(records):
    log, expected = StepLog(), {}
    for record in records:
        assert log.put(record) == (record.step not in expected)
        expected[record.step] = record
    ordered = [expected[step] for step in sorted(expected)]
    assert list(map(text, log)) == list(map(text, ordered))
    assert list(map(text, log[-3:])) == list(map(text, ordered[-3:]))
    assert len(log) == len(expected)
    if expected:
        assert text(log[-1]) == text(ordered[-1])


@given(st.lists(RECORDS, min_size=1), st.integers(0, 31))
def test_steps_that_never_were(records, step):
    log = StepLog()
    for record in records:
        log.put(record)
    before = list(log)
    log.forget_from(step)
    assert list(map(text, log)) == [text(record) for record in before if record.step < step]
    log.put(StepRecord(step=40, epoch=0, loss=1.0, samples=1))
    assert log[-1].metrics == {}


def test_what_is_handed_out_is_not_what_is_kept():
    log = StepLog()
    log.put(StepRecord(step=1, epoch=0, loss=math.inf, samples=1, metrics={"accuracy": 0.5}))
    log[0].metrics["accuracy"] = 0.0
    assert log[0].metrics == {"accuracy": 0.5}
    with pytest.raises(IndexError):
        log[1]


def test_a_million_steps_are_a_few_dozen_megabytes():
    log, a_step = StepLog(), math.inf
    tracemalloc.start()
    try:
        for step in range(1, 10_001):
            log.put(StepRecord(step=step, epoch=0, loss=0.1 * step, samples=32, seconds=0.01))
            if step > 9_000:
                # Least where the growing arrays are full, and hold nothing in reserve.
                a_step = min(a_step, tracemalloc.get_traced_memory()[0] / step)
    finally:
        tracemalloc.stop()
    assert 81 <= a_step < 82
