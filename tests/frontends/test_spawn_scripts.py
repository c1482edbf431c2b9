"""`paceline.spawn` from programs of every kind, and what is left when they are interrupted or killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.local.processes import all_gone, watch

# No `if __name__ == "__main__"` anywhere: ranks never import the program again.
PROGRAM = """
from dataclasses import dataclass
import enum, pickle, sys
import paceline

SCALE = 10

class Color(enum.Enum):
    RED = 1

class Base:
    def twice(self):
        return Point(self.x * 2, Color.RED)

@dataclass
class Point(Base):
    x: float
    color: Color

class OwnError(Exception):
    pass

def scaled(x):
    return x * SCALE

def work(ctx, point):
    assert pickle.loads(pickle.dumps(point)) == point
    return point.twice(), scaled(ctx.all_reduce([1.0])[0])

def fail(ctx):
    raise OwnError("own")

methods = dict(vars(Point))
results = paceline.spawn(work, Point(3, Color.RED), workers=2)
assert [total for _, total in results] == [20.0, 20.0], results
for point, _ in results:
    assert type(point) is Point and isinstance(point, Base) and point == Point(6, Color.RED)
    assert point.color is Color.RED
assert all(vars(Point)[name] is value for name, value in methods.items())
try:
    paceline.spawn(fail, workers=1)
except paceline.RankFailedError as error:
    assert type(error.original) is OwnError
assert "torch" not in sys.modules
print("all well")
"""


def check(command: list[str], folder: Path, text: str | None = None) -> None:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, input=text, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "all well\n", "")


def test_from_a_script(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    check(["program.py"], tmp_path)


def test_from_the_command_line(tmp_path):
    check(["-c", PROGRAM], tmp_path)


def test_from_standard_input(tmp_path):
    check(["-"], tmp_path, PROGRAM)


def test_from_a_module_with_warnings_as_errors(tmp_path):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "program.py").write_text(PROGRAM)
    check(["-W", "error", "-m", "pack.program"], tmp_path)


def test_functions_of_a_scripts_siblings_are_imported_by_ranks(tmp_path):
    script = tmp_path / "scripts" / "main.py"
    script.parent.mkdir()
    (script.parent / "sibling.py").write_text("class Thing: pass\ndef work(ctx):\n    return Thing()\n")
    script.write_text(
        "import paceline, sibling\n"
        "assert [type(x) for x in paceline.spawn(sibling.work, workers=2)] == [sibling.Thing] * 2\n"
        "print('all well')\n"
    )
    check(["scripts/main.py"], tmp_path)


ORDER = """
import paceline
print("before")
paceline.spawn(lambda ctx: print("rank"), workers=1)
print("after")
"""
CLOSED = """
import os, sys, paceline
os.close(1)
sys.exit(paceline.spawn(lambda ctx: print("x") or 7, workers=1)[0])
"""


def test_output_keeps_its_order_around_a_spawn():
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["before", "rank", "after"]
    assert done.stderr == ""


def test_a_closed_standard_output_does_no_harm():
    done = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, text=True, timeout=60)
    # The interpreter itself may complain on its way out about the output that was taken from it.
    assert done.returncode in (7, 120)
    assert "Traceback" not in done.stderr


HANGING = """
import os, signal, subprocess, sys, time
# Both are ignored where the tests run under nohup in the background, and children inherit that.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
import paceline
from paceline.engines.local.fork_server_client import fork_server

def hang(ctx):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    ctx.barrier()
    print(os.getpid(), child.pid, flush=True)
    ctx.barrier()
    if ctx.rank == 0:
        print("running", flush=True)
        time.sleep(3600)
    ctx.barrier()

paceline.spawn(lambda ctx: None, workers=1)
print(fork_server().pid, flush=True)
try:
    paceline.spawn(hang, workers=3)
except KeyboardInterrupt:
    with open(f"/proc/{fork_server().pid}/task/{fork_server().pid}/children") as file:
        print("interrupted, left:", file.read().split(), flush=True)
    raise
"""


@contextlib.contextmanager
def hanging(tmp_path: Path, text: str = HANGING) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A program in a process group of its own, as at a terminal, whose ranks hang; and all its pids."""
    (tmp_path / "hang.py").write_text(text)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "hang.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as program:
        assert program.stdout is not None
        try:
            pids: list[int] = []
            for line in program.stdout:
                if line.strip() == "running":
                    break
                pids += map(int, line.split())
            assert len(pids) == 7
            yield program, pids
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def test_no_rank_survives_a_kill_of_the_parent(tmp_path):
    with hanging(tmp_path) as (program, pids), watch(pids) as gone:
        assert len(gone) == 7
        program.kill()
        assert all_gone(gone, 5)


def test_no_rank_survives_a_kill_of_the_parent_even_if_it_had_forked(tmp_path):
    """A fork of the parent, made by code that Python does not see, holds copies of its sockets."""
    fork = "import ctypes\nctypes.CDLL(None).fork() or time.sleep(3600)\nprint(fork_server"
    program_that_forks = HANGING.replace("print(fork_server", fork, 1)
    with hanging(tmp_path, program_that_forks) as (program, pids), watch(pids) as gone:
        assert len(gone) == 7
        program.kill()
        assert all_gone(gone, 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_rank_survives_other_ends_of_the_parent(tmp_path, number):
    with hanging(tmp_path) as (program, pids), watch(pids) as gone:
        program.send_signal(number)
        assert all_gone(gone, 5)


def test_ctrl_c_ends_the_ranks_and_is_raised_in_the_program(tmp_path):
    with hanging(tmp_path) as (program, pids), watch(pids) as gone:
        os.killpg(program.pid, signal.SIGINT)
        out, err = program.communicate(timeout=20)
        assert "interrupted, left: []" in out
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert "Traceback" not in out
        # Ranks know nothing of it: the only traceback is the program's own.
        assert err.count("Traceback") == 1
        assert all_gone(gone, 5)
    assert program.returncode == -signal.SIGINT
