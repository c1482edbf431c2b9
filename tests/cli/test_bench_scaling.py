"""`paceline bench scaling`: efficiency by numbers of workers, and an exit code that a pipeline can use."""

from __future__ import annotations

import json

import pytest
from tests.cli.made_runs import Command

from paceline.cli.bench import parse_counts
from paceline.core.errors import UsageError
from paceline.frontends import scaling_benchmark
from paceline.frontends.scaling_benchmark import measure_scaling


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


def test_a_small_measurement(paceline):
    options = ["--workers", "2,1", "--steps", 2, "--rounds", 1, "--batch", 32]
    code, out, _ = paceline("bench", "scaling", *options, "--min-efficiency", 1000, "--json")
    found = json.loads(out)
    assert code == 1
    assert found["enough"] is False
    one, two = found["rows"]
    assert (one["workers"], two["workers"]) == (1, 2)
    assert one["efficiency"] == 1.0
    assert two["efficiency"] == pytest.approx(two["samples_per_second"] / one["samples_per_second"] / 2)
    assert two["samples_per_second"] == pytest.approx(32 / two["step_seconds"])


def test_the_best_round_of_each_number_counts_and_turns_are_taken(monkeypatch):
    times = iter([4.0, 3.0, 2.0, 1.0])
    asked = []

    def step(workers, most, steps, batch):
        asked.append((workers, most))
        return next(times)

    monkeypatch.setattr(scaling_benchmark, "_median_step", step)
    rows = measure_scaling([4, 2, 2], batch=8)
    assert asked == [(2, 4), (4, 4)] * 2
    assert [row.samples_per_second for row in rows] == [4.0, 8.0]
    assert [row.efficiency for row in rows] == [1.0, 1.0]


def test_enough_is_code_0_and_rows_are_lines(paceline, monkeypatch):
    monkeypatch.setattr(scaling_benchmark, "_median_step", lambda workers, *_: 1.0 / workers)
    code, out, _ = paceline(
        "bench", "scaling", "--workers", "1,2,4096", "--batch", 4096, "--min-efficiency", 0.85
    )
    assert code == 0
    assert out.splitlines()[2].split() == ["2", "8,192", "500.00", "1.00"]
    assert "note: 4096 workers share" in out
    monkeypatch.setattr(scaling_benchmark, "_median_step", lambda workers, *_: 1.0)
    code, out, _ = paceline("bench", "scaling", "--min-efficiency", 0.85)
    assert code == 1
    assert out.splitlines()[2].endswith("0.50  below 0.85")


def test_numbers_of_workers_are_read():
    assert parse_counts("4, 1,2,2") == [1, 2, 4]
    for text in ("", "1,", "0", "-1", "1;2"):
        with pytest.raises(UsageError):
            parse_counts(text)
