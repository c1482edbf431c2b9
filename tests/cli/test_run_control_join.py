"""`paceline scale`, `stop`, `status` and `join` as people use them."""

from __future__ import annotations

import json

import pytest
import typer
from tests.elastic.supervised_jobs import drop, running

from paceline.cli import join, run_control
from paceline.cli.main import invoke
from paceline.control.run_status import WorkerFacts
from paceline.core.events import StepCommitted
from paceline.core.journal import Journal

app = typer.Typer(rich_markup_mode=None)
app.command("scale")(run_control.scale)
app.command("stop")(run_control.stop)
app.command("status")(run_control.status)
app.command("join")(join.join)


def test_a_run_is_shown_scaled_and_stopped(tmp_path, capsys):
    with running(tmp_path, workers=2, steps=10**6, machine={"min_workers": 2, "most_workers": 6}) as run:
        run.until_step(5)
        assert invoke(app, ["status", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert "running" in shown
        assert "rank 1" in shown
        assert "samples/s" not in shown  # these workers measure nothing
        timed = StepCommitted(
            time=0.0,
            step=10**7,
            epoch=0,
            loss=0.0,
            samples=32,
            seconds=0.5,
            comm_time=0.125,
            data_time=0.05,
            compute_efficiency=0.6,
        )
        with Journal(tmp_path / "journal.jsonl") as journal:
            journal.append(timed)
        assert invoke(app, ["status", str(tmp_path)]) == 0
        assert (
            "last 1 step: 64 samples/s, communication 25.0%, data 10.0%, computing 60.0%"
            in capsys.readouterr().out
        )
        assert invoke(app, ["status", str(tmp_path), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert len(facts["workers"]) == 2
        assert facts["recent"]["communication_share"] == 0.25
        for wrong, said in (("1", "fewer than the 2"), ("600", "more than the 6 shards")):
            assert invoke(app, ["scale", str(tmp_path), "--workers", wrong]) == 2
            assert said in capsys.readouterr().err
        assert invoke(app, ["scale", str(tmp_path), "--workers", "3"]) == 0
        run.until(lambda: len(run.pids()) == 3)
        assert invoke(app, ["stop", str(tmp_path), "--reason", "enough"]) == 0
        assert drop(run.finish()).stopped == "enough"


def test_a_worker_is_shown_with_its_speed_and_its_memory():
    slow = WorkerFacts(
        rank=1,
        member=1,
        pid=7,
        host="a",
        place=0,
        phase="forward",
        step=4,
        shards=(2, 3),
        heard=0.25,
        shard_seconds=0.0125,
        rss=3_000_000,
    )
    assert run_control.worker_line(slow) == (
        "rank 1  pid 7  a  forward  step 4  shards 2,3  12.5 ms per shard  3.0 MB  heartbeat 0.2 s ago"
    )
    new = WorkerFacts(rank=0, member=0, pid=0, host="", place=0, phase="start", step=0)
    assert run_control.worker_line(new) == "rank 0  pid 0  -  start  step 0  shards none  no heartbeat yet"


def test_a_folder_without_a_run_is_a_mistake(tmp_path, capsys):
    assert invoke(app, ["status", str(tmp_path)]) == 5
    assert "no supervisor runs there" in capsys.readouterr().err
    assert invoke(app, ["scale", str(tmp_path), "--workers", "0"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "HOST:PORT"),
        (["127.0.0.1:99999"], "HOST:PORT"),
        (["127.0.0.1:1", "--workers", "0"], "workers"),
        (["127.0.0.1:1", "--key", "x"], "TLS"),
        (["127.0.0.1:1"], "holds no job secret"),
    ],
)
def test_mistakes_of_join_are_named(tmp_path, capsys, arguments, said):
    token = tmp_path / "token"
    token.write_text("not a token")
    assert invoke(app, ["join", *arguments, "--token-file", str(token)]) == 2
    assert said in capsys.readouterr().err


def test_join_without_a_supervisor_says_so(tmp_path, capsys):
    token = tmp_path / "token"
    token.write_text("ab" * 32)
    assert invoke(app, ["join", "127.0.0.1:1", "--token-file", str(token)]) == 1
    assert "no supervisor at" in capsys.readouterr().err
