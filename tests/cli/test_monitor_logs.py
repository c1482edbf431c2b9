"""`paceline monitor` and `paceline logs`: of a run that is over at once, of one in progress until it ends."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cli.made_runs import Command, write_log, write_run
from tests.train.made_journals import MadeRun

from paceline.core import events
from paceline.core.journal import Journal
from paceline.monitor.worker_log_lines import WorkerLogReader
from paceline.train.state import run_lock

JOURNAL = MadeRun(5, trouble=0.4).run()


@pytest.fixture
def paceline(capsys):
    return Command(capsys)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", JOURNAL)


class RunInProgress:
    """Holds the lock of a run's folder, as the process that trains does, until `end`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over, self._held = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold)
        self._thread.start()
        assert self._held.wait(10)

    def _hold(self) -> None:
        with run_lock.held(self._folder / "lock", "the run"):
            self._held.set()
            assert self._over.wait(60)

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def __enter__(self) -> None:
        """For a `with` behind that of the program which watches the run: it then ends, too."""

    def __exit__(self, *_: object) -> None:
        self.end()


def test_a_finished_run_is_shown_once(run, paceline):
    code, out, err = paceline("monitor", run)
    assert (code, err) == (0, "")
    assert "finished" in out
    assert "step 28" in out
    assert "samples/s" in out
    assert "lost workers" in out
    assert "rank" in out
    assert "step 28: finished" in out


def test_without_a_terminal_a_run_in_progress_is_lines_until_it_ends(tmp_path):
    run = write_run(tmp_path / "run", JOURNAL[:-1])
    held = RunInProgress(run)
    command = [sys.executable, "-m", "paceline", "monitor", str(run), "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, held:
        assert child.stdout is not None
        lines = [child.stdout.readline()]
        while not lines[-1].startswith("run: training"):
            assert lines[-1]
            lines.append(child.stdout.readline())
        assert "communication" not in lines[-1]
        with Journal(run / "journal.jsonl") as journal:
            journal.append(JOURNAL[-1])
        held.end()
        rest, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "step 28: finished" in rest
    assert rest.splitlines()[-1].startswith("run: finished, epoch 3, step 28")
    assert any("fails" in line for line in lines)


def test_on_a_terminal_it_is_drawn_until_it_ends(tmp_path):
    run = write_run(tmp_path / "run", JOURNAL[:-1])
    held = RunInProgress(run)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "paceline", "monitor", str(run), "--interval", "0.05"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment) as child, held:
        os.close(theirs)
        shown, ended = "", False
        while True:
            ready, _, _ = select.select([ours], [], [], 60)
            assert ready, shown
            try:
                shown += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the other end is closed
                break
            if "training" in shown and not ended:
                ended = True
                with Journal(run / "journal.jsonl") as journal:
                    journal.append(JOURNAL[-1])
                held.end()
        child.wait(60)
    os.close(ours)
    assert child.returncode == 0
    assert "finished" in shown
    assert "state" in shown


LINES = {
    0: [
        "23:59:58.100 info [rank 0] one",
        "00:00:01.000 info [rank 0] four",
        "00:00:03.000 error [rank 0] six",
    ],
    1: ["23:59:59.000 warning [rank 1] two", "Traceback:", "00:00:02.000 info [rank 1] five"],
}


def test_logs_are_merged_by_time_with_the_rank_in_front(run, paceline):
    for rank, lines in LINES.items():
        write_log(run, rank, *lines)
    code, out, _ = paceline("logs", run)
    assert code == 0
    assert [line.split(" | ")[0] + " " + line.split()[-1] for line in out.splitlines()] == [
        "rank 0 one", "rank 1 two", "rank 1 Traceback:", "rank 0 four", "rank 1 five", "rank 0 six",
    ]  # fmt: skip
    assert paceline("logs", run, "-n", 1)[1] == "rank 0 | 00:00:03.000 error [rank 0] six\n"
    assert paceline("logs", run, "-n", 0)[1] == ""
    assert len(paceline("logs", run, "--rank", 1)[1].splitlines()) == 3
    code, _, err = paceline("logs", run, "--rank", 4)
    assert code == 2
    assert "it has those of ranks 0 and 1" in err


def test_logs_of_a_run_whose_workers_never_started_are_missed(run, paceline):
    code, _, err = paceline("logs", run)
    assert code == 2
    assert "has no logs of workers" in err


def test_half_a_line_is_not_read_before_it_is_complete(tmp_path):
    file = tmp_path / "rank-3.log"
    file.write_text("12:00:00.000 info a\n12:00:00.1")
    (tmp_path / "other.log").write_text("no worker's")
    reader = WorkerLogReader(tmp_path)
    assert reader.read() == [(3, "12:00:00.000 info a")]
    assert reader.read() == []
    with file.open("a") as more:
        more.write("00 info b\n")
    assert reader.read() == [(3, "12:00:00.100 info b")]


def test_the_end_of_a_long_log_is_read_by_whole_lines(tmp_path):
    file = tmp_path / "rank-0.log"
    file.write_text("".join(f"12:00:00.000 info line {number:04}\n" for number in range(1000)))
    reader = WorkerLogReader(tmp_path, tail_bytes=100)
    assert [line[-4:] for _, line in reader.read()] == ["0997", "0998", "0999"]
    with file.open("a") as more:
        more.write("12:00:00.000 info line 1000\n")
    assert [line[-4:] for _, line in reader.read()] == ["1000"]
    assert len(WorkerLogReader(tmp_path, tail_bytes=10**6).read()) == 1001


def test_logs_are_followed_until_the_run_ends(run):
    held = RunInProgress(run)
    write_log(run, 0, "12:00:00.000 info [rank 0] first")
    command = [sys.executable, "-m", "paceline", "logs", str(run), "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, held:
        assert child.stdout is not None
        assert child.stdout.readline() == "rank 0 | 12:00:00.000 info [rank 0] first\n"
        write_log(run, 1, "12:00:01.000 info [rank 1] \x1b[31mred")
        assert child.stdout.readline().startswith("rank 1 | 12:00:01.000 info [rank 1] ")
        write_log(run, 0, "12:00:02.000 info [rank 0] last")
        held.end()
        rest, _ = child.communicate(timeout=60)
    assert rest == "rank 0 | 12:00:02.000 info [rank 0] last\n"
    assert child.returncode == 0


def test_an_unreadable_log_is_named(run, paceline):
    (run / "logs" / "rank-0.log").mkdir()
    code, _, err = paceline("logs", run)
    assert code == 1
    assert "rank-0.log cannot be read: it is not a regular file" in err


def test_what_the_journal_says_cannot_move_the_cursor(tmp_path, paceline):
    evil = events.WorkerStarted(time=JOURNAL[0].time, rank=0, pid=1, host="\x1b]0;x\x07[red]")
    run = write_run(tmp_path / "run", [JOURNAL[0], evil])
    code, out, _ = paceline("monitor", run, "--once")
    assert code == 0
    assert "\x1b" not in out
    assert "[red]" in out
