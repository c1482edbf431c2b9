"""`paceline ls`, `gc` and `status` of runs that are over: what is there, and what may go."""

from __future__ import annotations

import json

import pytest
from tests.cli.made_runs import Command, write_run
from tests.train.made_journals import MadeRun

from paceline.cli import runs
from paceline.core import events
from paceline.core.errors import UsageError
from paceline.train.state import run_lock

FINISHED = MadeRun(3, trouble=0.0, epochs=1).run()
KILLED = FINISHED[:-1]
FAILED = [*KILLED, events.RunFailed(time=KILLED[-1].time + 1, step=7, reason="too few workers are left")]


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


@pytest.fixture
def three(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, journal in (("first", FINISHED), ("second", FAILED), ("third", KILLED)):
        write_run(tmp_path / "runs" / name, journal)
    return tmp_path / "runs"


def test_runs_are_listed_with_state_steps_loss_size_and_age(three, paceline):
    code, out, err = paceline("ls")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if "│" not in line and line.split()}
    assert "finished" in rows["first"]
    assert "0.1429" in rows["first"]  # the loss of its seventh step
    assert rows["first"].split()[2] == "7"
    assert "failed" in rows["second"]
    assert "too few workers are left" in out
    assert "interrupted" in rows["third"]
    assert out.splitlines()[-1].startswith("3 runs, ")
    code, out, _ = paceline("ls", three, "--json")
    found = {run["path"].rpartition("/")[2]: run for run in json.loads(out)}
    assert code == 0
    assert found["first"]["state"] == "finished"
    assert found["first"]["step"] == 7
    assert found["first"]["loss"] == 1 / 7
    assert found["first"]["bytes"] > 500
    assert found["first"]["age"] > 0


def test_no_runs_are_no_error_unless_a_folder_was_named(tmp_path, monkeypatch, paceline):
    monkeypatch.chdir(tmp_path)
    assert paceline("ls") == (0, "no runs below runs\n", "")
    assert paceline("gc")[:2] == (0, "nothing to delete below runs\n")
    code, _, err = paceline("ls", "elsewhere")
    assert code == 2
    assert "there is no folder" in err


def test_gc_shows_first_and_deletes_when_told(three, paceline):
    code, out, _ = paceline("gc", "--older-than", "1d", "--state", "failed")
    assert code == 0
    assert f"would delete {three / 'second'} (failed, step 7," in out
    assert out.endswith("nothing is deleted yet: add --yes\n")
    assert len([*three.iterdir()]) == 3
    code, out, _ = paceline("gc", "--older-than", "1d", "--state", "failed", "--yes")
    assert code == 0
    assert out.startswith(f"deleted {three / 'second'}")
    assert sorted(path.name for path in three.iterdir()) == ["first", "third"]
    code, out, _ = paceline("gc", "--keep", "1", "--yes", "--json")
    assert json.loads(out)["deleted"] is True
    assert len(json.loads(out)["runs"]) == 1
    assert len([*three.iterdir()]) == 1


def test_a_run_in_progress_is_never_deleted(three, paceline):
    with run_lock.held(three / "first" / "lock", "the run"):
        code, out, _ = paceline("ls", "--json")
        assert json.loads(out)[0]["state"] == "running"
        code, out, _ = paceline("gc", "--older-than", "0s", "--yes")
    assert code == 0
    assert "2 runs" in out
    assert [path.name for path in three.iterdir()] == ["first"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--older-than", "soon"], "'soon' is not a time"),
        (["--older-than", "-1d"], "is not a time"),
        (["--state", "running"], "a run in progress is never deleted"),
        (["--state", "dead"], "give one of finished, stopped, failed, interrupted, not-begun"),
        (["--keep", "-1"], "--keep"),
        (["nowhere"], "there is no folder"),
    ],
)
def test_mistakes_of_gc_delete_nothing(three, paceline, arguments, said):
    code, _, err = paceline("gc", *arguments, "--yes")
    assert code == 2
    assert said in err
    assert len([*three.iterdir()]) == 3


def test_ages_are_read():
    assert [runs.parse_age(text) for text in ("90s", "30m", "12h", "7d", "2w", "1.5h")] == [
        90.0, 1800.0, 43200.0, 604800.0, 1209600.0, 5400.0,
    ]  # fmt: skip
    with pytest.raises(UsageError):
        runs.parse_age("7")


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("first", 3, "finished after step 7, "),
        ("second", 3, "failed (too few workers are left) after step 7, "),
        ("third", 4, "interrupted (killed: the journal has no end) after step 7, "),
    ],
)
def test_the_status_of_a_run_that_is_over_tells_its_end(three, paceline, name, code, said):
    given, out, err = paceline("status", name)
    assert (given, err) == (code, "")
    assert out.startswith(said)
    assert "loss   0.1429" in out
    given, out, _ = paceline("status", three / name, "--json")
    assert given == code
    found = json.loads(out)
    assert found["phase"] == said.split()[0]
    assert found["loss"] == 1 / 7


def test_without_a_name_commands_are_about_the_newest_run(three, paceline):
    write_run(three / "fourth", FINISHED)
    code, out, _ = paceline("audit")
    assert code == 0
    assert out.endswith("fourth: each step was committed once, each sample applied once\n")


def test_a_missing_run_is_named(tmp_path, monkeypatch, paceline):
    monkeypatch.chdir(tmp_path)
    for command in ("monitor", "logs", "report", "audit", "status"):
        code, _, err = paceline(command)
        assert code == 2, command
        assert "no run is given, and there is none below" in err
