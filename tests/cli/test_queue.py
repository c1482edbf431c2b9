"""`paceline queue` as people use it, and what it says to mistakes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.made_runs import Command
from tests.waiting import wait_for

from paceline.cli.submit_to_queue import QueueBatch
from paceline.core.available_resources import cores
from paceline.engines.batch import BatchSpec
from paceline.frontends.run_queue import queue_client
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.queued_run import QueuedRun
from paceline.frontends.run_queue.train_command import train_command

ROOT = Path(__file__).parents[2]


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with a script, and a queue of four workers without a server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_QUEUE", str(tmp_path / "queue"))
    (tmp_path / "script.py").write_text("print('trained')\n")
    (tmp_path / "bad.toml").write_text("wokers = 2\n")
    folder(tmp_path).change(lambda content: replace(content, capacity=4))
    return tmp_path


def folder(place: Path) -> QueueFolder:
    return QueueFolder.at(str(place / "queue"))


def add(paceline: Command, *words: str) -> str:
    code, out, err = paceline("queue", "add", "--no-server", *words)
    assert (code, err) == (0, "")
    return out


def only(place: Path) -> QueuedRun:
    (run,) = folder(place).read().runs
    return run


def test_what_is_added_is_listed_and_shown(place, paceline):
    said = add(paceline, "script.py", "--workers", "1-3", "--priority", "5", "--epochs", "3",
               "--set", "seed=4", "first", "--", "--lr", "0.1", "--token", "hush")  # fmt: skip
    assert "run 1 (script) is in the queue: 1-3 of 4 workers" in said
    assert "no server is running: paceline queue serve" in said
    request = only(place).request
    assert request.options == ("script.py", "--epochs", "3", "--set", "seed=4", "first")
    assert request.arguments == ("--lr", "0.1", "--token", "hush")
    assert (request.least, request.most, request.priority) == (1, 3, 5)
    assert request.folder == str(place)
    assert request.python == sys.executable
    code, out, err = paceline("queue", "ls")
    assert code == 0
    (row,) = [line for line in out.splitlines() if "script" in line]
    assert row.split()[:6] == ["1", "script", "waiting", "5", "1-3", "0"]
    assert "0 of 4 workers in use" in out
    assert "no server is running" in err
    code, out, _ = paceline("queue", "show", "1")
    assert "paceline train script.py --epochs 3 --set seed=4 first -- --lr 0.1 --token '***'" in out
    assert "hush" not in out
    code, out, _ = paceline("queue", "ls", "--json")
    listed = json.loads(out)
    assert (listed["workers"], listed["served"]) == (4, False)
    assert listed["runs"][0]["id"] == 1
    assert "hush" not in out
    assert json.loads(paceline("queue", "show", "script", "--json")[1])["notes"][0]["text"] == "added"


def test_a_run_without_a_size_may_use_all_workers(place, paceline, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    add(paceline, "script.py")
    assert only(place).request.size == "1-4"
    assert "1-4 of 4 workers" in add(paceline, "--epochs", "3", "script.py")  # in any order
    folder(place).change(lambda content: replace(content, capacity=0))
    added = json.loads(add(paceline, "script.py", "--json"))
    assert (added["id"], added["max_workers"], added["state"]) == (3, cores(), "waiting")


def test_a_queue_has_a_worker_for_each_gpu_of_its_machine(place, paceline, monkeypatch):
    monkeypatch.setattr(queue_client, "visible_gpus", lambda: 3)
    folder(place).change(lambda content: replace(content, capacity=0))
    assert json.loads(add(paceline, "script.py", "--json"))["max_workers"] == 3


def test_variables_travel_by_name_and_their_values_are_not_shown(place, paceline, monkeypatch):
    monkeypatch.setenv("MY_KEY", "hush")
    add(paceline, "script.py", "--env", "MY_KEY", "--env", "A=b")
    kept = only(place).request.environment
    assert (kept["MY_KEY"], kept["A"], kept["PATH"]) == ("hush", "b", os.environ["PATH"])
    assert "XDG_STATE_HOME" not in kept
    out = paceline("queue", "show", "1", "--json")[1]
    assert "MY_KEY" in json.loads(out)["variables"]
    assert "hush" not in out


def test_a_run_on_an_engine_keeps_how_this_login_reaches_its_nodes(place, paceline, monkeypatch):
    """The server may be of another login, whose ssh agent is gone."""
    reaches = {"SSH_AUTH_SOCK": "/run/agent.2", "OMPI_MCA_plm_rsh_agent": "ssh -p 2222"}
    for name, value in {**reaches, "OMPI_COMM_WORLD_SIZE": "1", "MY_KEY": "hush"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
    monkeypatch.setattr("paceline.cli.submit_to_queue.start_server", lambda folder: False)
    engine = ["--engine", "ssh", "--engine-set", "hosts=node1"]
    add(paceline, "script.py")
    assert not reaches.keys() & only(place).request.environment.keys()
    add(paceline, "script.py", *engine, "--workers", "1")
    added = folder(place).read().runs[-1]
    spec = BatchSpec(script="script.py", environment={"WANDB_MODE": "offline"})
    QueueBatch(["script.py", *engine], spec).submit_batch(spec)
    (submitted,) = QueueFolder.at(str(place / "state" / "paceline" / "submitted")).read().runs
    for kept in (added.request.environment, submitted.request.environment):
        assert reaches.items() <= kept.items()
        assert not {"OMPI_COMM_WORLD_SIZE", "MY_KEY"} & set(kept)
    assert submitted.request.environment["WANDB_MODE"] == "offline"


def test_a_file_whose_backend_is_ray_is_a_run_on_ray(place, paceline, monkeypatch):
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent.2")
    (place / "c.json").write_text(json.dumps({"backend": "ray", "batch_size": 8}))
    add(paceline, "script.py", "--config", "c.json", "--workers", "2-4")
    request = only(place).request
    assert (request.per_node, request.size) == (1, "2-4")
    assert request.environment["SSH_AUTH_SOCK"] == "/run/agent.2"
    assert "--nodes" in train_command(request, 4)


def test_a_run_on_an_engine_has_whole_nodes(place, paceline):
    add(paceline, "script.py", "--engine", "ray", "--workers-per-node", "2", "--workers", "2-4")
    request = only(place).request
    assert (request.per_node, request.size) == (2, "2-4")
    assert train_command(request, 4)[4:] == [
        *("script.py", "--engine", "ray", "--workers-per-node", "2", "--nodes", "2", "--min-workers", "2"),
        *("--set", "fault_tolerance.max_workers=4", "--run-dir", request.run_dir, "--resume", "auto"),
    ]


def test_another_size_of_a_run_on_an_engine_has_whole_nodes_too(place, paceline):
    add(paceline, "script.py", "--engine", "ray", "--workers-per-node", "2", "--workers", "2-4")
    code, _, err = paceline("queue", "set", "1", "--workers", "3", "--no-server")
    assert (code, "--workers 3-3: a node of this run has 2 workers, which come and go" in err) == (2, True)
    assert only(place).request.size == "2-4"
    assert paceline("queue", "set", "1", "--workers", "4", "--no-server")[0] == 0
    assert only(place).request.size == "4"


def test_the_order_is_that_of_the_workers(place, paceline):
    for name, priority in (("a", "0"), ("b", "5"), ("c", "5"), ("d", "-1")):
        add(paceline, "script.py", "--name", name, "--priority", priority)
    rows = json.loads(paceline("queue", "ls", "--json")[1])["runs"]
    assert [row["name"] for row in rows] == ["b", "c", "a", "d"]
    assert paceline("queue", "set", "a", "--priority", "9", "--workers", "2", "--no-server")[0] == 0
    rows = json.loads(paceline("queue", "ls", "--json")[1])["runs"]
    assert (rows[0]["name"], rows[0]["min_workers"], rows[0]["max_workers"]) == ("a", 2, 2)


def test_a_run_is_held_released_cancelled_and_cleared(place, paceline):
    add(paceline, "script.py")
    assert paceline("queue", "hold", "1", "--no-server") == (0, "run 1 (script) is held\n", "")
    assert paceline("queue", "release", "1", "--no-server") == (0, "run 1 (script) is waiting\n", "")
    assert paceline("queue", "clear", "1")[0] == 2
    assert paceline("queue", "cancel", "script", "--no-server") == (0, "run 1 (script) is cancelled\n", "")
    assert paceline("queue", "wait", "1") == (1, "run 1 (script): cancelled\n", "")
    assert paceline("queue", "clear") == (0, "1 run cleared\n", "")
    assert "no runs in the queue" in paceline("queue", "ls")[1]


MISTAKES = [
    ("add missing.py", 2, "the script missing.py cannot be read: No such file"),
    ("add --epochs 3", 2, "no script is given"),
    ("add script.py --workers 3-1", 2, "--workers 3-1: 3 is more than 1"),
    ("add script.py --workers 0-1", 2, "--workers 0-1: a run needs a worker"),
    ("add script.py --workers many", 2, "--workers many is no number of workers"),
    ("add script.py --workers 1-", 2, "--workers 1- is no number of workers"),
    ("add script.py --workers 1-5", 2, "this queue has 4 workers"),
    ("add script.py --workers 1-5", 2, "paceline queue serve --workers 5"),
    ("add script.py --name a/b", 2, "cannot be part of a folder's name"),
    ("add script.py --priority high", 2, "--priority"),
    ("add script.py --env NO_SUCH_NAME", 2, "there is no such variable here"),
    ("add script.py --bogus", 2, "No such option: --bogus"),
    ("add script.py --epochs many", 2, "--epochs"),
    ("add script.py --set wokers=2", 2, "did you mean workers?"),
    ("add script.py --set workers=2", 2, "--set workers: the queue decides about it"),
    ("add script.py --set workers=2", 2, "use --workers MIN-MAX"),
    ("add script.py --set seed", 2, "not of the form key=value"),
    ("add script.py --min-workers 2", 2, "--min-workers: the queue decides about it"),
    ("add script.py --resume 4", 2, "always continues from what it saved"),
    ("add script.py --config bad.toml", 2, "bad.toml: unknown key wokers"),
    ("add script.py --config missing.toml", 2, "missing.toml cannot be read"),
    ("add script.py --chaos explode", 2, "explode"),
    ("add script.py --num-gpus 2", 2, "use --workers MIN-MAX"),
    ("add script.py --backend spark", 2, "'spark' is unknown"),
    ("add script.py --engine spark", 2, "there is no engine 'spark'"),
    ("add script.py --engine ssh", 2, "needs hosts= or host_file="),
    ("add script.py --engine ray --nodes 2", 2, "--nodes: the queue decides about it"),
    ("add script.py --engine ray --workers-per-node 2 --workers 1-4", 2, "has 2 workers, which come and go"),
    ("add script.py --workers-per-node 2", 2, "none is chosen"),
    ("add script.py --engine ray --dry-run", 2, "--dry-run: the queue decides about it"),
    ("show 7", 2, "there is no run 7 in the queue"),
    ("logs 7", 2, "there is no run 7 in the queue"),
    ("wait 7", 2, "there is no run 7 in the queue"),
    ("cancel 7", 2, "there is no run 7 in the queue"),
    ("hold 7", 2, "there is no run 7 in the queue"),
    ("release 7", 2, "there is no run 7 in the queue"),
    ("set 7 --priority 1", 2, "there is no run 7 in the queue"),
    ("clear 7", 2, "there is no run 7 in the queue"),
    ("set 7", 2, "nothing is to be changed"),
    ("set 7 --workers 1-9", 2, "this queue has 4 workers"),
    ("serve --workers 0", 2, "--workers"),
    ("ls --queue script.py", 1, "cannot be made: File exists"),
]


@pytest.mark.parametrize(("line", "code", "said"), MISTAKES)
def test_a_mistake_is_named_and_nothing_is_added(place, paceline, line, code, said):
    given, out, err = paceline("queue", *line.split())
    assert (given, said in err) == (code, True), err or out
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert "unexpected" not in err
    assert folder(place).read().runs == ()
    assert not folder(place).is_served


def test_a_name_that_several_runs_have(place, paceline):
    for _ in range(2):
        add(paceline, "script.py")
    code, _, err = paceline("queue", "show", "script")
    assert (code, "several runs of the queue are called script: 1, 2" in err) == (2, True)
    paceline("queue", "cancel", "1", "--no-server")
    assert "run 2 (script)" in paceline("queue", "show", "script")[1]  # the one that has not ended


def test_a_damaged_queue(place, paceline):
    add(paceline, "script.py")
    (place / "queue" / "queue.json").write_text("{")
    for line in ("ls", "add script.py --no-server", "cancel 1", "serve", "wait 1"):
        code, _, err = paceline("queue", *line.split())
        assert code == 1
        assert "queue.json is damaged or cut off" in err
        assert "  try: bring a copy of it back" in err


def test_output_is_printed_from_any_line(place, paceline):
    add(paceline, "script.py")
    assert "has printed nothing: it is waiting" in paceline("queue", "logs", "1")[2]
    log = folder(place).log_of(1)
    log.parent.mkdir(parents=True)
    log.write_bytes(b"one\n10%\r20%\r30%\n\xff\x1b[2Jthree\nhalf")
    assert paceline("queue", "logs", "1")[1] == "one\n30%\n\N{REPLACEMENT CHARACTER}�[2Jthree\n"
    assert paceline("queue", "logs", "1", "-n", "2")[1].startswith("30%\n")
    assert paceline("queue", "logs", "1", "-n", "0")[1] == ""


def test_wait_gives_up(place, paceline, monkeypatch):
    monkeypatch.setattr("paceline.cli.queue._serve", lambda queue: False)
    add(paceline, "script.py")
    code, _, err = paceline("queue", "wait", "1", "--timeout", "0")
    assert code == 3
    assert "not ended after 0 s: run 1 (script) is waiting" in err


def program(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "queue", *words],
        cwd=place, env=_environment(), capture_output=True, text=True,
    )  # fmt: skip


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}


def test_a_server_is_started_on_demand_and_ends_when_all_is_done(place):
    """With a script that trains nothing: it is a run like any other, and its exit code is its result."""
    done = program(place, "add", "script.py")
    assert done.returncode == 0, done.stderr
    assert "a server was started" in done.stdout
    (place / "script.py").write_text("import sys\nprint('no such column', file=sys.stderr)\nsys.exit(3)\n")
    assert program(place, "add", "script.py", "--name", "broken").returncode == 0
    ended = program(place, "wait", "1", "2")
    assert ended.returncode == 1
    assert "run 2 (broken): failed (exit code 3: no such column)" in ended.stdout
    assert "no such column" in program(place, "logs", "2").stdout
    wait_for(lambda: not folder(place).is_served, "the server did not end")
    said = (place / "queue" / "server.log").read_text()
    assert "all runs have ended" in said
    wait_for(lambda: not _servers(place))


def _servers(place: Path) -> list[str]:
    """Processes whose command line names this queue."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(place / "queue").encode() in path.read_bytes():
                found.append(str(path))
    return found


@contextlib.contextmanager
def served(place: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "paceline", "queue", "serve"],
        cwd=place, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert "serving the queue" in child.stdout.readline()
        yield child
    finally:
        child.kill()
        child.communicate()


def test_two_servers_and_the_end_of_one(place, paceline):
    with served(place) as child:
        code, _, err = paceline("queue", "serve")
        assert code == 2
        assert f"is in use: process {child.pid} on" in err
        assert "one server is enough" in err
        child.send_signal(signal.SIGTERM)
        child.communicate(timeout=60)
        assert child.returncode == 0
    assert not folder(place).is_served


def test_a_server_whose_log_has_no_room_serves_on(place, paceline):
    add(paceline, "script.py")
    with open("/dev/full", "w") as full:
        served = subprocess.run(
            [sys.executable, "-m", "paceline", "queue", "serve", "--until-empty"],
            cwd=place, env=_environment(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert (served.returncode, served.stderr) == (0, "")
    assert only(place).state == "finished"
