"""`paceline simulate`: figures, exit codes, and a seed that replays."""

from __future__ import annotations

import json

import pytest

from paceline.cli.main import app, invoke
from paceline.elastic.machine import shard_assignment


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = invoke(app, ["simulate", *argv])
    return code, capsys.readouterr().out


def test_it_prints_schedules_a_minute_faults_and_violations(capsys):
    code, out = told(capsys, "--workers", "4", "--schedules", "20", "--seed", "1")
    assert code == 0
    assert "20 schedules of 4 workers" in out
    assert "a minute of one core" in out
    assert "crash in phase" in out
    assert out.rstrip().endswith("violations: 0")


def test_json_for_programs(capsys):
    code, out = told(capsys, "--workers", "3", "--schedules", "5", "--seed", "7", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["schedules"], facts["first_seed"], facts["violations"], facts["failing"]) == (5, 7, 0, [])
    assert facts["schedules_per_core_minute"] > 0


def test_a_seed_replays_to_the_same_trace(capsys):
    first = told(capsys, "--workers", "8", "--replay", "4", "--trace")
    assert first == told(capsys, "--workers", "8", "--replay", "4", "--trace")
    assert first[0] == 0
    assert "Began(" in first[1]
    assert "digest: " in first[1]


def test_a_violation_is_exit_code_1_and_says_how_to_see_it_again(capsys, monkeypatch):
    whole = shard_assignment.contiguous
    monkeypatch.setattr(shard_assignment, "contiguous", lambda shards, speeds: whole(shards - 1, speeds))
    code, out = told(capsys, "--workers", "2", "--schedules", "2", "--seed", "30")
    assert code == 1
    assert "violations: 2" in out
    assert "again: paceline simulate --workers 2 --replay 30 --trace" in out
    code, out = told(capsys, "--workers", "2", "--replay", "30")
    assert code == 1
    assert "sums shards" in out or "invariant 4" in out


def test_the_outcome_of_a_replay_as_json(capsys):
    code, out = told(capsys, "--workers", "2", "--replay", "3", "--json")
    assert code == 0
    assert json.loads(out)["violations"] == []


@pytest.mark.parametrize("wrong", [["--workers", "0"], ["--schedules", "0"], ["--processes", "0"]])
def test_numbers_that_make_no_sense_are_the_callers_mistake(capsys, wrong):
    assert told(capsys, *wrong)[0] == 2
