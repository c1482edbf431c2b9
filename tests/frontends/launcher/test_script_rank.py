"""A rank of the launcher is to its script what a fresh Python would be."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.frontends.launcher.launched import launched, write

from paceline import UsageError

SURROUNDINGS = """
    import json, os, sys
    import __main__
    facts = {
        "argv": sys.argv, "name": __name__, "file": __file__, "spec": __spec__, "path": sys.path[0],
        "cwd": os.getcwd(), "main": __main__.marker is marker if "marker" in globals() else None,
        "stdin": sys.stdin.read(), "variables": {k: v for k, v in os.environ.items() if k in %r},
    }
    marker = object()
    assert __main__.marker is marker
    print(json.dumps(facts))
"""
VARIABLES = [
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
    *("OMP_NUM_THREADS", "PACELINE_BACKEND"),
]


def test_surroundings_and_variables(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write(tmp_path, SURROUNDINGS % VARIABLES)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "77")  # of a launcher around this one
    done = launched(capfd, "train.py", "a b", 3, nproc_per_node=2, backend="gloo", run_id="job", role="actor")
    assert done.code == 0, done.err
    for rank in range(2):
        facts = json.loads(done.of(rank)[0])
        assert facts.pop("variables") == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "actor",
            "ROLE_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "3",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCHELASTIC_ERROR_FILE": "",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "OMP_NUM_THREADS": "1",
            "PACELINE_BACKEND": "gloo",
        }
        assert facts == {
            "argv": ["train.py", "a b", "3"],
            "name": "__main__",
            "file": str(script),
            "spec": None,
            "path": str(tmp_path),
            "cwd": str(tmp_path),
            "main": None,
            "stdin": "",
        }


def test_the_names_of_all_variables_are_torchruns(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One write: torchrun's ranks share a pipe, and an unbuffered print writes its end of line by itself.
    line = "(json.dumps(sorted(os.environ)) + chr(10)).encode()"
    script = write(tmp_path, f"import os, json; os.write(1, {line})")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    with_torchrun = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    done = launched(capfd, script, nproc_per_node=2)
    of_readline = {"COLUMNS", "LINES"}  # which torchrun happens to import
    theirs = {*json.loads(with_torchrun.stdout.splitlines()[0])} - of_readline
    assert {*json.loads(done.of(0)[0])} - of_readline == theirs


def test_an_error_in_a_function_that_torch_records_is_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = write(
        tmp_path,
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("no data")

        main()
        """,
    )
    done = launched(capfd, script, max_restarts=0)
    assert done.code == 1
    assert "it raised ValueError: no data" in done.said[0]
    assert f'File "{script}", line 6, in main' in "\n".join(done.said)


def test_one_rank_has_all_cores_as_under_torchrun(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = write(
        tmp_path, "import os, torch; print(os.environ.get('OMP_NUM_THREADS'), torch.get_num_threads())"
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (line,) = launched(capfd, script).of(0)
    assert line == f"None {len(os.sched_getaffinity(0))}"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert launched(capfd, script, nproc_per_node=2).of(1) == ["3 3"]


def test_what_a_fresh_process_may_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Spawn processes that import the script again, leave files open, threads running and exit handlers."""
    script = write(
        tmp_path,
        """
        import atexit, multiprocessing, os, pickle, sys, threading, torch

        class Kept:
            pass

        def square(number):
            return number * number

        if __name__ == "__main__":
            assert isinstance(pickle.loads(pickle.dumps(Kept())), Kept)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print("squares", pool.map(square, [1, 2, 3]))
            assert not torch.cuda.is_initialized()
            left_open = open(os.path.join(os.path.dirname(__file__), "left"), "w")
            left_open.write("all of it")
            atexit.register(lambda: print("at exit", square(4)))
            threading.Thread(target=lambda: print(f"thread {Kept.__module__}")).start()
            print("no end", end="")
            sys.exit(0)
        """,
    )
    done = launched(capfd, script)
    assert done.code == 0, done.err
    assert done.of(0)[0] == "squares [1, 4, 9]"
    assert "".join(done.of(0)).endswith("at exit 16")
    assert "thread __main__" in "".join(done.of(0))
    assert (tmp_path / "left").read_text() == "all of it"


def test_ranks_draw_different_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = "import numpy, random, torch; print(numpy.random.rand(), random.random(), torch.rand(1).item())"
    done = launched(capfd, write(tmp_path, source), nproc_per_node=2)
    first, second = (set(done.of(rank)[0].split()) for rank in range(2))
    assert not first & second


def test_groups_that_the_script_destroys_last_stay_until_its_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Where the main thread drops the last reference, it can wait for ever for a thread of the group.
    script = write(
        tmp_path,
        """
        import gc, weakref
        import torch.distributed as dist
        from torch.distributed import destroy_process_group
        dist.init_process_group("gloo")
        other = dist.new_group([0])
        groups = [weakref.ref(dist.group.WORLD), weakref.ref(other)]
        del other
        destroy_process_group()
        gc.collect()
        print([group() is not None for group in groups], dist.is_initialized())
        """,
    )
    done = launched(capfd, script, max_restarts=0)
    assert (done.code, done.of(0)) == (0, ["[True, True] False"]), done.err


def test_a_module_runs_as_python_m_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    write(package, "import sys; print(__name__, __spec__.name, sys.argv, sys.path[0])", "work.py")
    monkeypatch.chdir(tmp_path)
    done = launched(capfd, "some_package.work", "x", module=True)
    assert done.of(0) == [f"__main__ some_package.work {[str(package / 'work.py'), 'x']} {tmp_path}"]
    assert launched(capfd, "some_package.nothing", module=True, max_restarts=0).code == 1
    with pytest.raises(UsageError, match=r"there is no module no_package\.work"):
        launched(capfd, "no_package.work", module=True)


def test_any_program(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from paceline import DistributedLauncher, LaunchConfig
    from paceline.frontends.launcher.launch_program import Program

    script = write(tmp_path, "#!/bin/sh\necho $RANK of $WORLD_SIZE: $1\nexit $2\n", "train.sh")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    launcher = DistributedLauncher(LaunchConfig(nproc_per_node=2, max_restarts=0))
    assert launcher.run(Program(str(script), ("hello", "0"), executed=True)) == 0
    assert "[rank 1] 1 of 2: hello\n" in capfd.readouterr().out
    assert launcher.run(Program(str(script), ("hello", "9"), executed=True)) == 9
    assert launcher.run(Program(str(tmp_path / "none"), executed=True)) == 127
    assert "none cannot be run: No such file" in capfd.readouterr().err
    assert launcher.run(Program(sys.executable, ("-c", "import os; os._exit(0)"), executed=True)) == 0


def test_a_script_that_is_not_there_starts_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match=r"the script .*none\.py cannot be read: No such file"):
        launched(capfd, tmp_path / "none.py")
    with pytest.raises(UsageError, match="Is a directory"):
        launched(capfd, tmp_path)


def test_lines_of_many_ranks_are_never_torn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = write(
        tmp_path,
        """
        import os, sys
        for number in range(300):
            stream = (sys.stdout, sys.stderr)[number % 2]
            for piece in ("<", os.environ["RANK"] * 50, f" {number}", ">\\n"):
                stream.write(piece)
        """,
    )
    done = launched(capfd, script, nproc_per_node=4)
    assert done.code == 0
    for rank in range(4):
        for lines, odd in ((done.out, 0), (done.err, 1)):
            mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
            wanted = [f"[rank {rank}] <{str(rank) * 50} {number}>" for number in range(odd, 300, 2)]
            assert mine == wanted
    assert len(done.out) + len(done.err) == 1200
    shown = launched(capfd, script, nproc_per_node=2, shown_ranks=(1,))
    assert (len(shown.of(0)), len(shown.of(1))) == (0, 150)
