"""Faults done to a real process: each runs in a child, and what became of the child is what is looked at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.waiting import wait_for

from paceline.core import memory_cgroup
from paceline.core.chaos_spec import Chaos
from paceline.core.events import FaultInjected
from paceline.train.member.fault_injection import FaultInjector, InjectedError

PHASES = ("data", "forward", "backward", "collective", "optimizer")
LOOP = r"""
import os, sys, threading, time
from paceline.core.chaos_spec import Chaos
from paceline.train.member.fault_injection import FaultInjector

text, attempt, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def say(*words):
    # One system call: lines of several threads do not cut each other.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
injector = FaultInjector(Chaos(text), slot=1, attempt=attempt, mute=lambda s: say("mute", s))
for step in range(1, steps + 1):
    for phase in ("data", "forward", "backward", "collective", "optimizer"):
        say(step, phase)
        injector.at(phase, step)
say("done")
"""


class LoggedClock:
    """A clock that passes only in `sleep`, which returns at once, and where a test moves `time`."""

    def __init__(self) -> None:
        self.time, self.slept = 100.0, list[float]()

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


def start(text: str, *, attempt: int = 1, steps: int = 3, program: str = LOOP) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, text, str(attempt), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(text: str, **options) -> tuple[int, list[str], str]:
    """Exit status, the lines it wrote, and what it said on stderr."""
    with start(text, **options) as child:
        out, err = child.communicate(timeout=60)
    return child.returncode, out.splitlines(), err


def state_of(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat[stat.rfind(")") + 2 :].split()[0]


def waits_for_ever(thread: Path) -> bool:
    """Whether its system call, a wait for a lock, has no timeout: unlike a wait for Python's own lock."""
    words = (thread / "syscall").read_text().split()
    return len(words) > 4 and int(words[4], 16) == 0


def pending_signals(pid: int) -> int:
    """Those that were sent and not delivered yet, as bits."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("ShdPnd:")), 16)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("kill rank=1 step=2 phase=backward", -signal.SIGKILL),
        ("exit rank=1 step=2 phase=backward", 1),
        ("exit rank=1 step=2 phase=backward code=7", 7),
        ("leave rank=1 step=2 phase=backward", -signal.SIGTERM),
        ("raise rank=1 step=2 phase=backward", 1),
    ],
)
def test_the_process_ends_at_this_step_in_this_phase(text, status):
    code, lines, err = finish(text)
    assert code == status
    assert lines[-1] == "2 backward"
    assert "chaos:" in err
    if text.startswith("raise"):
        assert "InjectedError: chaos: raise rank=1 step=2 phase=backward" in err


def test_a_signal_with_a_delay_comes_after_its_phase_began():
    code, lines, err = finish(
        "kill rank=1 step=2 phase=backward after=1ms; hang rank=1 step=2 phase=optimizer"
    )
    assert code == -signal.SIGKILL
    assert lines[-1] in ("2 backward", "2 collective", "2 optimizer")
    assert "after=0.001s meets rank 1" in err


def test_without_a_step_it_comes_at_once_and_without_a_phase_in_the_first():
    assert finish("kill rank=1 phase=collective")[1][-1] == "1 collective"
    assert finish("kill rank=1 step=3")[1][-1] == "3 data"


@pytest.mark.parametrize("text", ["kill rank=0", "kill rank=1 step=4", "kill rank=1 phase=evaluation", ""])
def test_what_is_not_meant_for_it_does_not_meet_it(text):
    code, lines, err = finish(text)
    assert (code, lines[-1], err) == (0, "done", "")


def test_lives_can_be_named():
    assert finish("kill rank=1 step=2 attempt=1", attempt=2)[1][-1] == "done"
    assert finish("kill rank=1 step=2 attempt=all", attempt=2)[1][-1] == "2 data"
    assert finish("kill rank=1 step=2 times=2 attempt=1", attempt=3)[1][-1] == "done"
    assert finish("kill rank=1 step=2", attempt=2)[1][-1] == "2 data"


def lives_of(text: str, many: int, steps: int = 8) -> list[list[str]]:
    """What each of so many lives of a rank met, one after the other, each told what those before it met."""
    told: list[FaultInjected] = []

    def announce(event: FaultInjected, before: int, *, once: bool) -> bool:
        told.append(event)
        return True

    found = []
    for life in range(1, many + 1):
        injector = FaultInjector(Chaos(text), slot=0, attempt=life, announce=announce)
        injector.has_met([event.index for event in told])
        before = len(told)
        for step in range(1, steps + 1):
            try:
                for phase in PHASES:
                    injector.at(phase, step)
                injector.corrupt(step)
            except InjectedError:
                break
        found.append([f"{event.index}@{event.step}" for event in told[before:]])
    return found


@pytest.mark.parametrize(
    ("text", "met"),
    [
        # Whatever ended the life before, the next fault of the rank comes in the next life, and comes once.
        ("raise rank=0 step=5; raise rank=0", [["1@1"], ["0@5"], []]),
        ("raise rank=0 step=3; corrupt rank=0 step=6; raise rank=0 step=7", [["0@3"], ["1@6", "2@7"], []]),
        ("raise rank=0 step=2 times=2", [["0@2"], ["0@2"], []]),
        ("corrupt rank=0 step=2 times=2; raise rank=0 step=2 phase=optimizer", [["1@2"], ["0@2", "0@3"], []]),
        ("raise rank=0 step=2 attempt=2; raise rank=0 step=4", [["1@4"], ["0@2"], []]),
        ("raise rank=0 step=2 attempt=all", [["0@2"], ["0@2"], ["0@2"]]),
        ("raise rank=all step=2", [["0@2"], [], []]),
    ],
)
def test_without_a_named_life_a_fault_comes_once_in_a_run(text, met):
    assert lives_of(text, 3) == met


def test_slow_begins_once_and_ends_with_the_life():
    chaos, clock = Chaos("slow rank=0 factor=3; raise rank=0"), LoggedClock()
    second = FaultInjector(chaos, slot=0, attempt=2, clock=clock)
    second.has_met([1])  # the life before ended before it computed a shard
    second.at("data", 1)
    assert second.slow(1.0) == 2.0
    third = FaultInjector(chaos, slot=0, attempt=3, clock=clock)
    third.has_met([1, 0])
    third.at("data", 1)
    assert third.slow(1.0) == 0.0


def test_a_fault_waits_for_its_next_chance_while_no_supervisor_knows_of_it():
    heard, told = [False], []

    def announce(event: FaultInjected, before: int, *, once: bool) -> bool:
        told.append((event.step, event.phase, event.fault, event.rank, before, once))
        return heard[0]

    injector = FaultInjector(Chaos("raise rank=3 step=2 phase=forward"), slot=3, announce=announce)
    for step in (1, 2):
        for phase in PHASES:
            injector.at(phase, step)
    heard[0] = True
    with pytest.raises(InjectedError):
        injector.at("forward", 3)
    injector.at("forward", 4)
    fault = "raise rank=3 step=2 phase=forward"
    assert told == [(2, "forward", fault, 3, 0, True), (3, "forward", fault, 3, 0, True)]


def test_a_fault_that_names_its_life_does_not_wait():
    injector = FaultInjector(
        Chaos("raise rank=0 step=2 attempt=1"), slot=0, announce=lambda event, before, once: once
    )
    with pytest.raises(InjectedError):
        injector.at("data", 2)


def test_a_stopped_process_stands_until_it_is_continued():
    with start("stop rank=1 step=2") as child:
        wait_for(lambda: state_of(child.pid) == "T")
        child.send_signal(signal.SIGCONT)
        assert child.communicate(timeout=60)[0].splitlines()[-1] == "done"
    assert child.returncode == 0


def test_a_stop_can_end_by_itself():
    started = time.monotonic()
    code, lines, _ = finish("stop rank=1 step=2 for=300ms")
    assert (code, lines[-1]) == (0, "done")
    assert time.monotonic() - started > 0.3


BEATING = LOOP.replace(
    "for step",
    """
def beat():
    while True:
        say("beat")
        time.sleep(0.01)
threading.Thread(target=beat, daemon=True).start()
for step""",
    1,
)


def test_a_hang_leaves_the_other_threads_alone():
    with start("hang rank=1 step=2 phase=forward", program=BEATING) as child:
        assert child.stdout is not None
        lines = iter(child.stdout.readline, "")
        assert any(line == "2 forward\n" for line in lines)
        assert [next(lines) for _ in range(20)] == ["beat\n"] * 20
        child.kill()
        child.communicate(timeout=60)


def test_a_deadlock_stops_all_threads_of_the_process():
    with start("deadlock rank=1 step=2 phase=forward for=1s", program=BEATING) as child:
        assert child.stdout is not None
        gaps: list[float] = []
        last = time.monotonic()
        seen = False
        for line in child.stdout:
            now = time.monotonic()
            if seen:
                gaps.append(now - last)
            seen = seen or line == "2 forward\n"
            last = now
            if line == "done\n":
                break
        child.communicate(timeout=60)
    assert child.returncode == 0
    assert max(gaps) > 0.5


def test_a_deadlock_for_ever_ends_only_by_a_kill():
    with start("deadlock rank=1 step=2 phase=forward", program=BEATING) as child:
        assert child.stdout is not None
        assert any(line == "2 forward\n" for line in child.stdout)
        main_thread = Path(f"/proc/{child.pid}/task/{child.pid}")

        def stands() -> bool:
            return "futex" in (main_thread / "wchan").read_text() and waits_for_ever(main_thread)

        wait_for(stands)
        # It does not even notice a signal that Python would handle.
        child.send_signal(signal.SIGINT)
        wait_for(lambda: not pending_signals(child.pid))
        wait_for(stands)
        child.kill()
        child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL


def test_a_partition_is_silent_and_stands_in_the_next_collective():
    started = time.monotonic()
    code, lines, _ = finish("partition rank=1 step=2 for=300ms")
    assert (code, lines[-1]) == (0, "done")
    assert time.monotonic() - started > 0.3
    assert lines[lines.index("mute 0.3") - 1] == "2 data"


def test_a_partition_holds_the_collective_for_what_is_left_of_it():
    clock, muted = LoggedClock(), list[float]()
    chaos = Chaos("partition rank=0 step=1 phase=data for=5s")
    injector = FaultInjector(chaos, slot=0, mute=muted.append, clock=clock)
    injector.at("data", 1)
    assert (muted, clock.slept) == ([5.0], [])
    clock.time += 2.0
    injector.at("forward", 1)
    injector.at("collective", 1)
    assert clock.slept == [3.0]
    injector.at("collective", 2)
    assert clock.slept == [3.0]


def can_limit_memory() -> str:
    """Why this process cannot make a memory group; empty if it can."""
    try:
        memory_cgroup.make_cgroup_below(f"paceline-test-{os.getpid()}", 64 << 20).remove()
    except OSError as error:
        return str(error)
    return ""


def test_out_of_memory_is_a_kill_by_the_kernel():
    why = can_limit_memory()
    if why:
        pytest.skip(f"memory cgroups: {why}")
    present = memory_cgroup.cgroup_of(os.getpid())
    assert present is not None
    with start("oom rank=1 step=2 phase=forward") as child:
        out, _ = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert out.splitlines()[-1] == "2 forward"
    # The group goes with the process.
    wait_for(lambda: not (present.path / f"paceline-oom-{child.pid}").exists())


def test_out_of_memory_where_no_group_can_be_made(monkeypatch):
    def refuse(name: str, limit: int) -> None:
        raise PermissionError("not for you")

    monkeypatch.setattr(memory_cgroup, "make_cgroup_below", refuse)
    with pytest.raises(MemoryError, match="not for you"):
        FaultInjector(Chaos("oom rank=0"), slot=0).at("data", 1)


def test_slow_takes_so_many_times_as_long():
    clock = LoggedClock()
    injector = FaultInjector(Chaos("slow rank=0 factor=3 step=2 times=2"), slot=0, clock=clock)
    told = []
    for step in range(1, 6):
        injector.at("data", step)
        told += [injector.slow(0.5), injector.slow(0.25)]
    assert clock.slept == [1.0, 0.5, 1.0, 0.5]
    assert told == [0.0, 0.0, *clock.slept, 0.0, 0.0, 0.0, 0.0]


def test_slow_for_a_time():
    clock = LoggedClock()
    injector = FaultInjector(Chaos("slow rank=0 factor=2 for=5s"), slot=0, clock=clock)
    for _ in range(4):
        injector.at("data", 1)
        injector.slow(1.0)
        clock.time += 1.0
    assert clock.slept == [1.0, 1.0, 1.0]


def test_a_hang_of_a_time_lasts_that_long_and_no_longer():
    clock = LoggedClock()
    FaultInjector(Chaos("hang rank=0 phase=data for=5s"), slot=0, clock=clock).at("data", 1)
    assert clock.slept == [5.0]


def test_corrupt_is_answered_once_a_step_and_as_often_as_told():
    injector = FaultInjector(Chaos("corrupt rank=0 step=3 times=2"), slot=0)
    asked = []
    for step in (1, 2, 3, 3, 4, 5):
        injector.at("data", step)
        asked.append(injector.corrupt(step))
    assert asked == [False, False, True, False, True, False]
    assert not FaultInjector(Chaos("corrupt rank=0"), slot=1).corrupt(1)
    assert not FaultInjector(None, slot=0).corrupt(1)


def test_a_step_that_is_done_again_does_not_meet_the_fault_again():
    injector = FaultInjector(Chaos("raise rank=0 step=2 phase=forward"), slot=0)
    injector.at("forward", 1)
    with pytest.raises(InjectedError):
        injector.at("forward", 2)
    injector.at("forward", 2)
    injector.at("forward", 3)


def test_a_worker_that_begins_after_the_step_does_not_meet_it():
    injector = FaultInjector(Chaos("raise rank=0 step=20"), slot=0)
    injector.at("data", 31)
    again = FaultInjector(Chaos("raise rank=0 step=20 attempt=all"), slot=0, attempt=2)
    with pytest.raises(InjectedError):
        again.at("data", 31)


def test_random_faults_come_where_they_were_drawn():
    chaos = Chaos("random kinds=raise rate=0.2 seed=5 until=60")
    drawn = {
        step: fault.phase
        for step in range(1, 101)
        if (fault := chaos.random[0].draw(step, rank=3)) is not None
    }
    met: dict[int, str] = {}
    injector = FaultInjector(chaos, slot=3)
    for step in range(1, 101):
        for _ in range(2):
            for phase in PHASES:
                try:
                    injector.at(phase, step)
                except InjectedError:
                    assert step not in met
                    met[step] = phase
    assert met == drawn
    assert len(met) > 5


def test_waiting_for_the_others_is_met_only_by_name():
    quiet = FaultInjector(Chaos("raise rank=0"), slot=0)
    quiet.at("wait", 0)
    quiet.at("start", 0)
    with pytest.raises(InjectedError, match="in phase data of step 1"):
        quiet.at("data", 1)
    joining = FaultInjector(Chaos("raise rank=0 phase=wait attempt=2"), slot=0, attempt=2)
    with pytest.raises(InjectedError, match="in phase wait"):
        joining.at("wait", 0)
