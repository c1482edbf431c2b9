"""A server and real processes: what becomes of runs that end, fail, crash, are cancelled, held and preempted,
and of a server that is started anew. The runs are shell programs; test_preemption.py has those that train."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from tests.frontends.run_queue.queue_parts import Served, served
from tests.virtual_clock import VirtualClock
from tests.waiting import wait_for

from paceline.control import liveness_lock
from paceline.core import atomic_file
from paceline.core.errors import UsageError
from paceline.core.host import host_identity
from paceline.frontends.run_queue import queue_client, run_observation
from paceline.frontends.run_queue.queue_client import own_workers
from paceline.frontends.run_queue.queue_folder import QueueFolder
from paceline.frontends.run_queue.serving import serve

# Waits as WAIT does, and says that it has begun: before that it has no handler.
READY = 'trap "exit 75" TERM\ntouch ready-$0\nwhile [ ! -e go ]; do sleep 0.01; done\n'


def parent_of(queue: Served, number: int) -> int:
    """The parent of a run's process."""
    queue.until(lambda: run_observation.process_group(queue.folder, queue.run(number)) is not None)
    found = run_observation.process_group(queue.folder, queue.run(number))
    assert found is not None
    return found


def process_of(queue: Served, number: int) -> int:
    parent = parent_of(queue, number)
    children = Path(f"/proc/{parent}/task/{parent}/children")
    wait_for(lambda: children.read_text().split())
    return int(children.read_text().split()[0])


def test_runs_finish_and_fail_and_the_queue_goes_on(tmp_path):
    with served(tmp_path, capacity=1) as queue:
        failing = queue.add('echo begun; echo "ValueError: no such column" >&2; exit 3')
        ending = queue.add("exit 0")
        queue.until_state(failing, "failed")
        queue.until_state(ending, "finished")
        run = queue.run(failing)
        assert run.reason == "exit code 3: ValueError: no such column"
        assert run.tail == ("begun", "ValueError: no such column")
        assert run.attempt == 1
        # One worker: the second began when the first had ended.
        states = [line.split(": ", 1)[1].split(" [")[0] for line in queue.lines]
        assert states == [
            "running: 1 worker",
            "failed: exit code 3: ValueError: no such column",
            "running: 1 worker",
            "finished",
        ]


def test_the_command_of_a_run(tmp_path):
    with served(tmp_path, capacity=4) as queue:
        program = 'echo "$@" > words\npwd >> words\necho "$MARK" "$PACELINE_GPU_CLAIMS" >> words\n'
        number = queue.add(program, least=1, most=3, arguments=("--lr", "0.1"), environment={"MARK": "here"})
        queue.until_state(number, "finished")
        words, where, variables = (tmp_path / "words").read_text().splitlines()
        assert words == (
            "--workers 3 --min-workers 1 --set fault_tolerance.max_workers=3 "
            f"--run-dir {tmp_path}/runs/1 --resume auto -- --lr 0.1"
        )
        # Workers of all runs of this queue take different GPUs.
        assert (where, variables) == (str(tmp_path), f"here {tmp_path}/queue")


def test_a_crash_is_started_again_and_a_row_of_crashes_is_a_failure(tmp_path):
    with served(tmp_path) as queue:
        once = queue.add('if [ ! -e seen ]; then touch seen; kill -9 $$; fi\n')  # fmt: skip
        queue.until_state(once, "finished")
        assert queue.run(once).attempt == 2
        again = [note.text for note in queue.run(once).notes]
        assert "waiting: killed by SIGKILL after step 0: started again at once" in again
        always = queue.add("echo last words; kill -9 $$")
        queue.until(lambda: queue.run(always).crashes == 2)
        run = queue.run(always)
        assert run.state == "waiting"
        assert run.not_before > run.since  # it pauses
        queue_client.want(queue.folder, str(always), "cancel")


def test_the_parent_of_a_run_is_killed_and_the_run_goes_on(tmp_path):
    with served(tmp_path) as queue:
        number = queue.add(READY)
        queue.until(lambda: (tmp_path / "ready-1.sh").exists())
        process = process_of(queue, number)
        os.kill(parent_of(queue, number), signal.SIGKILL)
        wait_for(lambda: _parent(process) == 1 or _parent(process) != 0)
        for _ in range(5):
            queue.server.look()
        assert queue.state(number) == "running"
        assert queue.run(number).attempt == 1
        # Nobody saw its exit code: it is started again, and says it then.
        (tmp_path / "go").touch()
        queue.until_state(number, "finished")
        assert queue.run(number).attempt == 2


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_the_process_of_a_run_is_killed(tmp_path):
    with served(tmp_path) as queue:
        number = queue.add(READY)
        queue.until(lambda: (tmp_path / "ready-1.sh").exists())
        (tmp_path / "ready-1.sh").unlink()
        os.kill(process_of(queue, number), signal.SIGKILL)
        queue.until(lambda: (tmp_path / "ready-1.sh").exists())
        assert queue.run(number).attempt == 2


def test_a_new_server_finds_the_runs_of_the_old_one(tmp_path):
    with served(tmp_path) as queue:
        number = queue.add(READY)
        queue.until(lambda: (tmp_path / "ready-1.sh").exists())
        first = process_of(queue, number)
        queue.restart()
        for _ in range(3):
            queue.server.look()
        assert queue.run(number).attempt == 1
        assert process_of(queue, number) == first
        # An exit code that no server was there to see.
        (tmp_path / "go").touch()
        wait_for(lambda: run_observation.exit_code(queue.folder, queue.run(number)) == 0)
        queue.restart()
        queue.server.look()
        assert queue.state(number) == "finished"
        assert queue.run(number).attempt == 1


def test_a_run_that_was_noted_and_never_started(tmp_path, monkeypatch):
    """The server was killed between the two."""
    with served(tmp_path) as queue:
        number = queue.add("exit 0")
        with monkeypatch.context() as patch:
            patch.setattr(queue.server, "_start", lambda run: None)
            queue.server.look()
        assert queue.state(number) == "running"
        queue.restart()
        queue.until_state(number, "finished")
        assert queue.run(number).attempt == 2


def test_a_higher_priority_preempts_and_gives_back(tmp_path):
    with served(tmp_path, capacity=2) as queue:
        low = queue.add(READY, least=2, most=2)
        queue.until(lambda: (tmp_path / "ready-1.sh").exists())
        high = queue.add("exit 0", name="urgent", least=1, most=1, priority=5)
        queue.until_state(high, "finished")
        (tmp_path / "go").touch()
        queue.until_state(low, "finished")
        run = queue.run(low)
        assert run.attempt == 2
        texts = [note.text for note in run.notes]
        assert "stopping: run 2 of priority 5 gets workers" in texts
        assert queue.run(high).attempt == 1


def test_a_stop_that_comes_while_the_process_is_being_started_reaches_it(tmp_path):
    with served(tmp_path) as queue:
        number = queue.add("while [ ! -e go ]; do sleep 0.01; done")
        queue.server.look()  # starts it
        queue_client.want(queue.folder, str(number), "cancel")
        queue.until_state(number, "cancelled")
        assert not (tmp_path / "go").exists()


def test_a_run_of_fixed_size_gives_way_to_a_higher_priority(tmp_path):
    """It has no supervisor. What it was to shrink to before that was known is not what it has."""
    clock = VirtualClock()
    with served(tmp_path, capacity=4, steady=clock) as queue:
        large = queue.add(READY, most=4)
        queue.until(lambda: list(tmp_path.glob("ready-*")))
        urgent = queue.add("exit 0", least=2, most=2, priority=5)
        queue.server.look()
        assert (queue.run(large).workers, queue.state(urgent)) == (2, "waiting")
        clock.advance(61.0)
        queue.until_state(urgent, "finished")
        assert "stopping" in " ".join(note.text for note in queue.run(large).notes)


def test_a_new_server_knows_with_what_a_run_of_fixed_size_began(tmp_path):
    with served(tmp_path, capacity=4) as queue:
        large = queue.add(READY, most=4)
        queue.until_state(large, "running")
        other = queue.add("exit 0", least=2, most=2)
        queue.server.look()
        assert queue.run(large).workers == 2
        queue.restart()
        queue.server.look()
        assert queue.state(other) == "waiting"


def test_the_shards_of_a_folder_are_known_before_the_first_start(tmp_path):
    with served(tmp_path, capacity=8) as queue:
        folder = tmp_path / "runs" / "1"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text("shards = 4\n")
        number = queue.add('echo "$@" > words', most=8)
        queue.until_state(number, "finished")
        words = (tmp_path / "words").read_text()
        assert words.startswith("--workers 4 --min-workers 1 --set fault_tolerance.max_workers=4 ")
        (tmp_path / "runs" / "2").mkdir()
        (tmp_path / "runs" / "2" / "config.toml").write_text("shards = 4\n")
        with pytest.raises(UsageError, match=r"--workers: 6 and more, and the run in \S+ has 4 shards"):
            queue.add("exit 0", least=6, most=8)


def test_ended_runs_that_are_too_many_leave_the_queue_with_their_output(tmp_path, monkeypatch):
    monkeypatch.setattr(queue_client, "KEPT_ENDED", 2)
    with served(tmp_path) as queue:
        numbers = [queue.add("echo here")]
        for _ in range(4):
            queue.until_state(numbers[-1], "finished")
            numbers.append(queue.add("echo here"))
        queue.until_state(numbers[-1], "finished")
        assert [run.id for run in queue.folder.read().runs] == numbers[2:]
        there = sorted(int(path.name) for path in (queue.folder.path / "runs").iterdir())
        assert there == numbers[2:]


def test_processes_on_another_machine_are_not_signalled(tmp_path, monkeypatch):
    with served(tmp_path) as queue:
        number = queue.add(READY)
        queue.until(lambda: list(tmp_path.glob("ready-*")))
        queue.folder.change(
            lambda content: content.updated(number, lambda run: replace(run, host="elsewhere"))
        )
        queue_client.want(queue.folder, str(number), "cancel")
        for _ in range(5):
            queue.server.look()
        run = queue.run(number)
        assert (run.state, run.signalled) == ("stopping", 0)
        assert sum("started on another machine" in note.text for note in run.notes) == 1
        queue.folder.change(
            lambda content: content.updated(number, lambda run: replace(run, host=host_identity()))
        )
        queue.until_state(number, "cancelled")


def test_a_clock_that_is_set_back_holds_no_run_for_long(tmp_path):
    with served(tmp_path) as queue:
        number = queue.add("if [ ! -e seen ]; then touch seen; kill -9 $$; fi\n")
        queue.folder.change(
            lambda content: content.updated(number, lambda run: replace(run, not_before=time.time() + 3600))
        )
        queue.until_state(number, "finished")


def test_a_run_that_is_stopping_gets_one_signal(tmp_path):
    """The second would end it at once, also if a new server has taken over."""
    program = "trap 'echo signal >> signals' TERM\nwhile [ ! -e go ]; do sleep 0.01; done\nexit 75\n"
    with served(tmp_path, capacity=1) as queue:
        number = queue.add(f"touch ready\n{program}")
        queue.until(lambda: (tmp_path / "ready").exists())
        queue_client.want(queue.folder, str(number), "hold")
        queue.until(lambda: (tmp_path / "signals").exists())
        queue.restart()
        for _ in range(5):
            queue.server.look()
        assert (tmp_path / "signals").read_text() == "signal\n"
        (tmp_path / "go").touch()
        queue.until_state(number, "held")
        queue_client.want(queue.folder, str(number), "cancel")


def test_cancel_hold_and_release(tmp_path):
    with served(tmp_path, capacity=1) as queue:
        training, waiting = queue.add(READY), queue.add("exit 0")
        queue.until(lambda: (tmp_path / "ready-1.sh").exists())
        assert queue_client.want(queue.folder, str(waiting), "hold").state == "held"
        assert queue_client.want(queue.folder, str(training), "cancel").state == "running"
        queue.until_state(training, "cancelled")
        assert queue.run(training).code == 75
        with pytest.raises(UsageError, match=r"run 1 \(train\) has ended: cancelled"):
            queue_client.want(queue.folder, str(training), "hold")
        with pytest.raises(UsageError, match="is held already"):
            queue_client.want(queue.folder, str(waiting), "hold")
        for _ in range(3):
            queue.server.look()
        assert queue.state(waiting) == "held"
        queue_client.want(queue.folder, str(waiting), "run")
        queue.until_state(waiting, "finished")


def test_a_run_that_ignores_the_request_is_killed(tmp_path):
    with served(tmp_path) as queue:
        number = queue.add("trap '' TERM\ntouch ready\nwhile true; do sleep 0.01; done\n")
        queue.until(lambda: (tmp_path / "ready").exists())
        queue_client.want(queue.folder, str(number), "cancel")
        queue.until_state(number, "stopping")
        queue_client.want(queue.folder, str(number), "kill")
        queue.until_state(number, "cancelled")


def test_a_run_is_killed_with_what_outlives_its_process_to_save(tmp_path):
    """Supervisor and workers have sessions of their own, and hold a lock in the run's folder."""
    with served(tmp_path) as queue:
        folder = tmp_path / "runs" / "1"
        folder.mkdir(parents=True)
        holder = (
            "import signal, sys; from pathlib import Path; from paceline.control import liveness_lock\n"
            "with liveness_lock.held(Path(sys.argv[1])):\n"
            "    Path('held').touch(); signal.pause()\n"
        )
        (tmp_path / "holder.py").write_text(holder)
        number = queue.add(f"setsid {sys.executable} holder.py {folder} &\n{READY}")
        queue.until(lambda: (tmp_path / "held").exists() and list(tmp_path.glob("ready-*")))
        queue_client.want(queue.folder, str(number), "kill")
        queue.until_state(number, "cancelled")
        assert not liveness_lock.holders(folder)


def test_a_server_in_the_background_is_for_all_runs_and_says_how_many_workers_it_has(tmp_path):
    """The shell that adds the first run may be bound to one GPU and one thread."""
    with served(tmp_path) as queue:
        number = queue.add('echo "${CUDA_VISIBLE_DEVICES-none} ${OMP_NUM_THREADS-none}" > words')
        queue.folder.change(lambda content: replace(content, capacity=0))
        program = (
            "import sys; from paceline.frontends.run_queue.queue_folder import QueueFolder\n"
            "from paceline.frontends.run_queue.serving import start_server\n"
            "assert start_server(QueueFolder.at(sys.argv[1]))\n"
        )
        shell = {**os.environ, "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", program, str(queue.folder.path)], env=shell, check=True)
        wait_for(lambda: queue.state(number) == "finished", "the run ends")
        assert (tmp_path / "words").read_text() == "none none\n"
        wait_for(lambda: not queue.folder.is_served, "the server ends with the last run")
        assert queue.folder.read().counted == own_workers()


def test_a_run_that_was_stopped_by_hand_is_held(tmp_path):
    with served(tmp_path, capacity=1) as queue:
        number = queue.add("exit 75\n")
        queue.until_state(number, "held")
        assert "paceline queue release 1" in queue.run(number).reason
        queue_client.want(queue.folder, str(number), "cancel")


def test_a_folder_or_a_python_that_is_gone(tmp_path):
    with served(tmp_path) as queue:
        lost = queue.add("exit 0", folder=str(tmp_path / "nowhere"))
        queue.until_state(lost, "failed")
        assert (
            queue.run(lost).reason == f"it cannot be started: {tmp_path}/nowhere: No such file or directory"
        )
        (tmp_path / "shell").unlink()
        (tmp_path / "shell").mkdir()
        broken = queue.add("exit 0")
        queue.until_state(broken, "failed")
        assert "cannot be started: Permission denied" in queue.run(broken).reason


def test_a_full_disk_stops_nothing_and_is_told_once(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with served(tmp_path, capacity=2) as queue:
        first = queue.add(READY)
        queue.until(lambda: (tmp_path / "ready-1.sh").exists())
        second = queue.add("exit 0")
        with monkeypatch.context() as patch:
            patch.setattr(atomic_file, "replace", full)
            for _ in range(3):
                queue.server.look()
            assert sum("No space left on device" in line for line in queue.lines) == 1
            # The first ends meanwhile: its exit code has room.
            (tmp_path / "go").touch()
            wait_for(lambda: run_observation.exit_code(queue.folder, queue.run(first)) == 0)
            queue.server.look()
            assert queue.state(first) == "running"
            assert queue.state(second) == "waiting"
        queue.until_state(first, "finished")
        queue.until_state(second, "finished")
        assert "the queue can be written again" in queue.lines
        assert queue.run(first).attempt == queue.run(second).attempt == 1


def test_a_run_that_needs_more_than_there_is_waits_and_lets_others_pass(tmp_path):
    with served(tmp_path, capacity=4) as queue:
        large, small = queue.add("exit 0", least=3, most=3), queue.add("exit 0")
        queue.capacity = 2
        queue.restart()
        queue.until_state(small, "finished")
        run = queue.run(large)
        assert run.state == "waiting"
        assert queue_client.remark(run, 2) == "needs 3 workers, and the queue has 2"
        queue.capacity = 3
        queue.restart()
        queue.until_state(large, "finished")


def test_many_runs_in_a_row(tmp_path):
    with served(tmp_path, capacity=1) as queue:
        numbers = [queue.add(f"echo {number} >> order", priority=number // 3) for number in range(6)]
        for number in numbers:
            queue.until_state(number, "finished")
        assert (tmp_path / "order").read_text().split() == ["3", "4", "5", "0", "1", "2"]


def test_a_server_that_ends_with_its_runs_outlives_a_queue_that_cannot_be_locked_for_a_while(tmp_path):
    lines: list[str] = []
    folder = QueueFolder.at(str(tmp_path / "queue"))
    impatient = QueueFolder(folder.path, VirtualClock(autojump=True))
    with ExitStack() as held:

        def hold_for_one_look() -> bool:
            if any(line.startswith("error: ") for line in lines):
                held.close()
            else:
                held.enter_context(folder.locked())
            return False

        serve(impatient, 3, lines.append, until_empty=True, is_over=hold_for_one_look)
    assert lines[1].startswith(f"error: another command has held {folder.lock_file} for 30 s")
    assert lines[2:] == ["the queue can be written again", "all runs have ended"]


def test_serve_ends_when_all_is_done_and_gives_the_lock_back(tmp_path):
    lines: list[str] = []
    folder = QueueFolder.at(str(tmp_path / "queue"))
    serve(folder, 3, lines.append, until_empty=True)
    assert lines == [f"serving the queue {folder.path} with 3 workers", "all runs have ended"]
    assert not folder.is_served
    assert folder.read().capacity == 3
