"""Ranks started by the engine: what they get, what comes back, what an error says."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engines.local.plain_entry import ENTRY, launch

from paceline.core.errors import (
    CommTimeoutError,
    DisagreementError,
    InternalError,
    PeerLostError,
    RankFailedError,
    ResourceError,
    UsageError,
)
from paceline.engines.local import Launch, launch as launching, run, thread_counts
from paceline.engines.local.forked_rank import RankTask

FOREVER = 3600


def who(task: RankTask, *args: Any) -> tuple[Any, ...]:
    return task.rank, task.workers, args


def test_results_come_back_by_rank():
    assert launch(who, "a", {"b": 1}, workers=4) == [(rank, 4, ("a", {"b": 1})) for rank in range(4)]


def test_ranks_of_several_requests_are_one_group(monkeypatch):
    """A message carries a limited number of descriptors: a large group is asked for in parts."""
    monkeypatch.setattr(launching, "_RANKS_PER_REQUEST", 2)
    assert launch(lambda task: (task.rank, task.workers), workers=5) == [(rank, 5) for rank in range(5)]


def test_more_ranks_than_descriptors_are_an_error_with_a_remedy_and_leave_nothing():
    launch(who, workers=1)  # the server is there
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for room in (12, 24, 40, 50):
        before = os.listdir("/proc/self/fd")
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + room, hard))
        try:
            with pytest.raises(ResourceError, match="too many"):
                launch(who, workers=16)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert os.listdir("/proc/self/fd") == before


def test_lambdas_and_closures_travel():
    factor = 3
    assert launch(lambda task, x: task.rank * factor + x, 10, workers=2) == [10, 13]


def test_large_arguments_and_results_arrive():
    sent = np.arange(2_000_000, dtype=np.float64)
    for rank, (total, back) in enumerate(launch(_sum_and_change, sent, workers=2)):
        assert total == sent.sum()
        np.testing.assert_array_equal(back, sent + rank)
    np.testing.assert_array_equal(sent, np.arange(2_000_000))


def _sum_and_change(task: RankTask, data: Any) -> Any:
    total = data.sum()
    data += task.rank
    return total, data


def test_ranks_see_the_callers_surroundings(tmp_path, monkeypatch):
    launch(who, workers=1)
    # Everything changes after the server was started.
    (tmp_path / "made_just_now.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_TEST_VALUE", "new \udcff")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["prog", "--flag"])
    for rank, seen in enumerate(launch(_surroundings, workers=2)):
        assert seen == {
            "cwd": str(tmp_path),
            "value": "new \udcff",
            "argv": ["prog", "--flag"],
            "answer": 42,
            "ranks": [str(rank), "2", str(rank), "2"],
            "stdin": "",
            "session": True,
            "terminal": False,
        }


def _surroundings(task: RankTask) -> dict[str, Any]:
    import made_just_now  # type: ignore[import-not-found]

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {
        "cwd": os.getcwd(),
        "value": os.environ["PACELINE_TEST_VALUE"],
        "argv": sys.argv,
        "answer": made_just_now.ANSWER,
        "ranks": [os.environ[name] for name in names],
        "stdin": sys.stdin.read(),
        "session": os.getsid(0) == os.getpid(),
        "terminal": os.isatty(0),
    }


def test_output_goes_to_the_callers_descriptors_line_by_line(capfd):
    launch(_chatter, workers=4)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == sorted(
        f"rank {rank} says {'x' * 50}" for rank in range(4) for _ in range(50)
    )
    assert sorted(err.splitlines()) == [f"rank {rank} complains" for rank in range(4)]


def _chatter(task: RankTask) -> None:
    for _ in range(50):
        print("rank", task.rank, "says", "x" * 50)
    sys.stderr.write(f"rank {task.rank} complains")
    sys.stderr.write("\n")


def test_text_without_a_newline_is_written_at_the_end(capfd):
    launch(lambda task: print("no newline", end=""), workers=1)
    assert capfd.readouterr().out == "no newline"


def test_threads_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert launch(_omp, workers=2) == [str(share)] * 2
    assert launch(_omp, workers=2, threads=3) == ["3"] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launch(_omp, workers=1) == ["5"]


def _omp(task: RankTask) -> str:
    return os.environ["OMP_NUM_THREADS"]


def test_a_library_loaded_before_the_ranks_is_told_too():
    """NumPy's OpenBLAS has one thread in the server and starts the others when it is told to."""
    assert launch(_blas_threads, workers=1, threads=3, preload=("numpy",)) == [3]
    assert launch(_blas_threads, workers=1, threads=1, preload=("numpy",)) == [1]


def _blas_threads(task: RankTask) -> int:
    (library,) = thread_counts.loaded("openblas")
    asking = [name.replace("set_num", "get_num") for name in thread_counts.OPENBLAS_SETTERS]
    handle = ctypes.CDLL(library)
    return next(int(getattr(handle, name)()) for name in asking if hasattr(handle, name))


def test_the_server_has_one_thread_and_ranks_have_their_own_randomness():
    seen = launch(_randomness, workers=3, preload=("numpy",))
    assert len({numpy for _, numpy, _ in seen}) == 3
    assert len({python for _, _, python in seen}) == 3
    assert [threads for threads, _, _ in seen] == [1, 1, 1]


def _randomness(task: RankTask) -> tuple[int, float, float]:
    return _threads_of_server(task), float(np.random.rand()), random.random()


class OddError(Exception):
    """Pickles well and cannot be rebuilt."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def _raise(task: RankTask, failing: int, kind: str) -> None:
    if task.rank == failing:
        if kind == "value":
            raise ValueError("the value is bad")
        if kind == "odd":
            raise OddError(5, "odd")
        if kind == "holds a socket":
            raise RuntimeError(socket.socket())
        if kind == "usage":
            raise UsageError("bad op", remedy="use SUM")
        if kind == "exit 3":
            sys.exit(3)
        if kind == "exit text":
            sys.exit("no data found")
        if kind == "interrupt":
            raise KeyboardInterrupt
    time.sleep(FOREVER)


def test_an_exception_names_the_rank_and_shows_its_traceback_and_is_the_cause():
    with pytest.raises(RankFailedError) as caught:
        launch(_raise, 1, "value", workers=3, grace=0.05)
    error = caught.value
    assert error.rank == 1
    assert 'raise ValueError("the value is bad")' in error.traceback_text
    assert "plain_entry" not in error.traceback_text
    assert "the value is bad" in str(error)
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize("kind", ["odd", "holds a socket"])
def test_an_exception_that_cannot_travel_is_told_as_text(kind):
    with pytest.raises(RankFailedError, match=r"OddError: 5: odd|RuntimeError: <socket") as caught:
        launch(_raise, 0, kind, workers=1)
    assert caught.value.__cause__ is None


def test_an_error_of_ours_keeps_its_type():
    with pytest.raises(UsageError, match="bad op") as caught:
        launch(_raise, 1, "usage", workers=2, grace=0.05)
    assert caught.value.remedy == "use SUM"
    assert "raised on rank 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("exit 3", r"rank 0 .* called sys.exit\(3\)"),
        ("exit text", "no data found"),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_sys_exit_with_a_reason_and_interrupts_are_failures(kind, words):
    with pytest.raises(RankFailedError, match=words):
        launch(_raise, 0, kind, workers=2, grace=0.05)


@pytest.mark.parametrize("code", [None, 0])
def test_sys_exit_zero_is_a_result_of_none(code):
    assert launch(lambda task: sys.exit(code), workers=2) == [None, None]


def test_the_cause_is_blamed_although_its_echo_came_first(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with pytest.raises(RankFailedError, match="the root of it") as caught:
        launch(_echo_first, str(gate), workers=3, grace=10.0)
    assert caught.value.rank == 2
    assert any("PeerLostError" in note for note in caught.value.__notes__)


def _echo_first(task: RankTask, gate: str) -> None:
    if task.rank == 2:
        # Opens only once rank 0 has reported its failure.
        with open(gate, "rb"):
            raise ZeroDivisionError("the root of it")
    error = (
        PeerLostError("rank 2 is gone", rank=2) if task.rank == 0 else DisagreementError("rank 2 is missing")
    )
    task.fail(error)
    if task.rank == 0:
        with open(gate, "wb"):
            raise error
    raise error


def _die(task: RankTask, how: str) -> None:
    if task.rank == 1:
        if how == "segfault":
            ctypes.string_at(0)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            os._exit(int(how))
    time.sleep(FOREVER)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", r"rank 1 \(pid \d+\) was killed by signal 9 \(SIGKILL\)[\s\S]*out-of-memory"),
        ("segfault", r"was killed by signal 11 \(SIGSEGV\)[\s\S]*string_at[\s\S]*in _die"),
        ("7", "exited with code 7 before its function returned"),
        ("0", "exited with code 0 before its function returned"),
    ],
)
def test_a_rank_that_dies_is_named(how, words):
    with pytest.raises(PeerLostError, match=words) as caught:
        launch(_die, how, workers=3, grace=0.05)
    assert caught.value.ranks == (1,)


def test_a_death_after_the_result_is_still_told():
    with pytest.raises(PeerLostError, match="after its function had returned"):
        launch(_die_at_exit, workers=1)


def _die_at_exit(task: RankTask) -> int:
    import atexit

    atexit.register(os.kill, os.getpid(), signal.SIGKILL)
    return 1


def test_exit_handlers_run_and_threads_finish_before_a_rank_ends(tmp_path):
    launch(_leave_work, str(tmp_path), workers=1)
    assert (tmp_path / "thread").exists()
    assert (tmp_path / "handler").exists()


def _leave_work(task: RankTask, folder: str) -> None:
    import atexit
    from concurrent.futures import ThreadPoolExecutor

    released = threading.Event()

    def release_after_return() -> None:
        threading.main_thread().join(0.1)
        released.set()

    def work() -> None:
        released.wait(10)
        Path(folder, "thread").touch()

    ThreadPoolExecutor(1).submit(work)
    threading.Thread(target=release_after_return).start()
    atexit.register(Path(folder, "handler").touch)


def test_a_timeout_names_the_ranks_and_where_they_are():
    # Local functions travel by value: ranks get to them without importing this module, well within the limit.
    def hang_on_one(task: RankTask) -> None:
        if task.rank == 1:
            time.sleep(FOREVER)

    started = time.monotonic()
    with pytest.raises(CommTimeoutError, match=r"rank 1 of 2 did not finish within 1 s") as caught:
        launch(hang_on_one, workers=2, timeout=1)
    assert caught.value.waiting_for == (1,)
    assert "in hang_on_one" in str(caught.value)
    assert "plain_entry" not in str(caught.value)
    assert time.monotonic() - started < 20


def test_a_rank_that_cannot_answer_does_not_hold_up_the_timeout():
    def stop_myself(task: RankTask) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(CommTimeoutError, match="rank 0: no Python code was running"):
        launch(stop_myself, workers=1, timeout=1)


def test_an_argument_that_cannot_travel_is_named():
    with (
        socket.socket() as unsendable,
        pytest.raises(UsageError, match=r"argument 2 of who, of type socket\.socket"),
    ):
        launch(who, 1, unsendable)
    lock = threading.Lock()
    with pytest.raises(UsageError, match="closure variable"):
        launch(lambda task: lock)


def test_a_result_that_cannot_travel_is_named():
    with pytest.raises(UsageError, match=r"result of rank 1, of type .*lock") as caught:
        launch(_return_lock_on_one, workers=2)
    assert "raised on rank 1" in caught.value.__notes__[0]


def _return_lock_on_one(task: RankTask) -> Any:
    return threading.Lock() if task.rank == 1 else None


class OnlyThere:
    """Refuses to be rebuilt in the process that started the ranks."""

    def __init__(self, home: int) -> None:
        self.home = home

    def __setstate__(self, state: dict[str, int]) -> None:
        if os.getpid() == state["home"]:
            raise RuntimeError("not here")
        self.__dict__.update(state)


def test_a_result_that_cannot_be_rebuilt_is_named():
    with pytest.raises(
        UsageError, match="result of rank 0 arrived but cannot be rebuilt here: RuntimeError: not here"
    ):
        launch(lambda task, home: OnlyThere(home), os.getpid(), workers=1)


def test_a_module_that_ranks_cannot_import_is_named(monkeypatch):
    module = type(sys)("only_in_the_parent")
    exec("def work(task): return 1", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_in_the_parent", module)
    with pytest.raises(UsageError, match="only_in_the_parent") as caught:
        launch(module.work, workers=1)
    assert "register_pickle_by_value" in caught.value.remedy


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": 0}, "workers must be"),
        ({"workers": 2.0}, "workers must be"),
        ({"workers": True}, "workers must be"),
        ({"threads": 0}, "threads must be"),
        ({"timeout": 0}, "timeout must be"),
        ({"timeout": "1"}, "timeout must be"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"preload": (1,)}, "preload must be"),
        ({"function": 5}, "must be a function"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(settings, words):
    with pytest.raises(UsageError, match=words):
        run(Launch(**{"entry": ENTRY, "function": who, **settings}))


def test_a_preload_that_fails_is_shown():
    with pytest.raises(UsageError, match=r"'no_such_module_anywhere'[\s\S]*ModuleNotFoundError"):
        launch(who, preload=("no_such_module_anywhere",))
    assert launch(who, workers=1) == [(0, 1, ())]


def test_a_preload_that_starts_threads_is_refused_and_does_no_harm(tmp_path, monkeypatch):
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"'starts_a_thread' started 1 thread"):
        launch(who, preload=("starts_a_thread",))
    assert launch(_threads_of_server, workers=1) == [1]


def _threads_of_server(task: RankTask) -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def test_an_unknown_entry_is_a_bug_of_ours():
    with pytest.raises(InternalError, match="no entry"):
        run(Launch(entry="tests.engines.local.plain_entry:nothing", function=who))


def test_the_folder_of_the_caller_may_be_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert launch(who, workers=1) == [(0, 1, ())]
