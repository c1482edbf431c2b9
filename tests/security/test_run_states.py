"""`status`, `scale` and `stop` where a run cannot be asked: each case has its sentence and its code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.elastic.supervised_jobs import drop, running
from tests.waiting import wait_for

from paceline.cli import main
from paceline.control import liveness_lock

ROOT = Path(__file__).parents[2]
COMMANDS = [["status"], ["stop"], ["scale", "--workers", "2"]]


def outcome(capsys: pytest.CaptureFixture[str], command: list[str], folder: Path) -> tuple[int, str]:
    code = main.invoke(main.app, [command[0], str(folder), *command[1:]])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_folder_that_is_not_there_and_one_without_a_run(tmp_path, capsys):
    for command in COMMANDS:
        code, said = outcome(capsys, command, tmp_path / "nowhere")
        assert (code, "there is no folder" in said) == (6, True)
        code, said = outcome(capsys, command, tmp_path)
        assert (code, "is not the folder of a run" in said) == (5, True)
        code, said = outcome(capsys, command, Path("/etc"))
        assert (code, "is not the folder of a run" in said) == (5, True)


def test_a_run_that_ended_says_so_with_its_step(tmp_path, capsys):
    with running(tmp_path, workers=1, steps=10**6) as run:
        run.until_step(3)
        run.supervised.stop("enough")
        drop(run.finish())
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"type":"run_ended","time":1.0,"step":9,"epoch":0,"reason":"enough","hash":"x"}\n')
    for command in COMMANDS:
        code, said = outcome(capsys, command, tmp_path)
        sentence = "(enough) after step 9" if command == ["status"] else "has ended after step 9: enough"
        assert (code, sentence in said) == (3, True)


CALLER = """
import sys
from pathlib import Path
from tests.elastic.supervised_jobs import running
with running(Path(sys.argv[1]), workers=1, steps=10**6, patience=0.2) as run:
    run.until_step(3)
    print(run.supervised.pid, *run.pids().values(), flush=True)
    run.finish(600)
"""


def test_a_run_that_was_killed_says_so(tmp_path, capsys):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CALLER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pids = [int(pid) for pid in caller.stdout.readline().split()]
        # The caller first: it would start another supervisor.
        os.kill(caller.pid, signal.SIGKILL)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: liveness_lock.is_free(tmp_path), "workers are still there")
    assert (tmp_path / "control.json").exists()
    for command in COMMANDS:
        code, said = outcome(capsys, command, tmp_path)
        sentence = "killed: the journal has no end" if command == ["status"] else "was killed"
        assert (code, sentence in said) == (4, True)
