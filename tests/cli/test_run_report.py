"""`paceline report`: a page, JUnit's XML and pytest's JSON, of runs as their journals and checkpoints are."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from tests.cli.made_runs import Command, write_run
from tests.train.made_journals import MadeRun

from paceline.checkpoint.store import CheckpointStore
from paceline.core import events
from paceline.core.journal import Journal, iterate
from paceline.monitor.check_documents import junit_xml, pytest_json
from paceline.monitor.journal_history import history_of
from paceline.monitor.run_checks import RunCheck

JOURNAL = MadeRun(5, trouble=0.4).run()


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", JOURNAL)


def test_a_page_and_both_documents(run, tmp_path, paceline):
    files = [tmp_path / name for name in ("out/r.html", "r.xml", "r.json")]
    code, out, err = paceline("report", run, "-o", files[0], "--junit", files[1], "--json", files[2])
    assert (code, err) == (0, "")
    assert out.endswith("6 of 7 checks passed, 0 failed\n")
    page = files[0].read_text()
    assert "Training loss" in page
    assert "Workers" in page  # the timeline
    suite = ElementTree.parse(files[1]).getroot()[0]
    assert suite.attrib["name"] == "run"
    assert (suite.attrib["tests"], suite.attrib["failures"], suite.attrib["skipped"]) == ("7", "0", "1")
    assert {case.attrib["name"] for case in suite} == {
        "came_to_its_end", "journal_is_whole", "steps_committed_once", "each_sample_once",
        "each_shard_once", "replicas_agree", "checkpoint_verifies",
    }  # fmt: skip
    found = json.loads(files[2].read_text())
    assert [*found] == [
        "created", "duration", "exitcode", "root", "environment", "summary", "collectors", "tests",
    ]  # fmt: skip
    assert found["exitcode"] == 0
    assert found["summary"] == {"passed": 6, "skipped": 1, "total": 7, "collected": 7}
    assert found["tests"][2]["nodeid"] == "run::steps_committed_once"
    assert found["tests"][2]["call"] == {"duration": 0.0, "outcome": "passed", "stdout": "28 steps"}


def test_without_an_option_the_page_is_in_the_folder(run, paceline):
    assert paceline("report", run)[0] == 0
    assert (run / "report.html").stat().st_size > 1000


def test_what_is_wrong_fails_and_is_named(tmp_path, paceline):
    steps = [event for event in JOURNAL if isinstance(event, events.StepCommitted)]
    run = write_run(tmp_path / "run", [event for event in JOURNAL if event is not steps[9]])
    with (run / "journal.jsonl").open("a") as file:
        file.write("not an event\n")
    store = CheckpointStore(run / "checkpoints")
    (run / "checkpoints" / "v00000001").mkdir()
    (run / "checkpoints" / "v00000001" / "manifest.json").write_text("{}")
    assert store.versions() == [1]
    code, out, _ = paceline("report", run, "--junit", tmp_path / "r.xml", "--json", tmp_path / "r.json")
    assert code == 1
    assert "failed run::steps_committed_once: step" in out
    assert "failed run::journal_is_whole: byte" in out
    assert "failed run::checkpoint_verifies[1]:" in out
    found = json.loads((tmp_path / "r.json").read_text())
    failed = {test["nodeid"]: test for test in found["tests"] if test["outcome"] == "failed"}
    assert found["exitcode"] == 1
    assert found["summary"]["failed"] == len(failed) >= 3
    assert "missing" in failed["run::steps_committed_once"]["call"]["longrepr"]
    assert failed["run::steps_committed_once"]["call"]["crash"]["message"]
    cases = ElementTree.parse(tmp_path / "r.xml").getroot()[0]
    wrong = [case.attrib["name"] for case in cases if case.find("failure") is not None]
    assert len(wrong) == len(failed)


@pytest.mark.parametrize(
    ("end", "outcome", "text"),
    [
        ([], "failed", "the journal has no end"),
        ([events.RunFailed(time=9e9, step=28, reason="boom")], "failed", "boom"),
        ([events.RunEnded(time=9e9, step=28, epoch=3, reason="SIGTERM", hash="x")], "skipped", "SIGTERM"),
    ],
)
def test_an_end_is_an_outcome(tmp_path, paceline, end, outcome, text):
    run = write_run(tmp_path / "run", [*JOURNAL[:-1], *end])
    paceline("report", run, "--json", tmp_path / "r.json")
    test = json.loads((tmp_path / "r.json").read_text())["tests"][0]
    assert test["outcome"] == outcome
    assert text in test["call"]["longrepr"]


def test_two_runs_are_compared_and_told_apart(run, tmp_path, paceline):
    other = write_run(tmp_path / "elsewhere" / "run", JOURNAL)
    code, _, _ = paceline("report", run, other, "-o", tmp_path / "r.html", "--json", tmp_path / "r.json")
    assert code == 0
    assert "Same bits." in (tmp_path / "r.html").read_text()
    ids = [test["nodeid"] for test in json.loads((tmp_path / "r.json").read_text())["tests"]]
    assert len({*ids}) == 14


def test_a_folder_that_cannot_be_written_is_named(run, paceline):
    (run / "file").write_text("")
    for option in ("-o", "--junit", "--json"):
        code, _, err = paceline("report", run, option, run / "file" / "below")
        assert code == 1
        assert "cannot be written to" in err


def test_the_history_counts_each_step_once_over_all_starts(tmp_path):
    made = MadeRun(11, trouble=0.6, epochs=6).run()
    assert any(isinstance(event, events.RunResumed) for event in made)
    with Journal(tmp_path / "journal.jsonl") as journal:
        for event in made:
            journal.append(event)
    history = history_of(iterate(tmp_path / "journal.jsonl"), "here")
    assert [record.step for record in history.steps] == [*range(1, history.steps[-1].step + 1)]
    assert sum(record.samples for record in history.steps) == 6 * 53
    assert history.stopped is None
    assert history.run_dir == "here"


def test_documents_can_hold_any_text():
    check = RunCheck("a\x00<b>", "name", "failed", "first & \x1b\nsecond")
    tree = ElementTree.fromstring(junit_xml([check], created=0.0))
    assert tree[0].attrib["name"] == "a?<b>"
    failure = tree[0][0].find("failure")
    assert failure is not None
    assert failure.attrib["message"] == "first & ?"
    assert tree[0].attrib["timestamp"] == "1970-01-01T00:00:00+00:00"
    assert json.dumps(pytest_json([check], created=0.0, duration=1.0, root="/", environment={}))
