"""Real programs that are stopped and killed: exit codes, what is left of them, and the run that goes on."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys

import pytest
from tests.engines.local.processes import all_gone, watch
from tests.frontends.training_programs import family, program, wait_for_step
from tests.train import small_run
from tests.train.small_run import STEPS, fit, settings, steps_of, workers_of
from tests.waiting import wait_for

import paceline
from paceline.core import events


@pytest.fixture(scope="module")
def quiet(tmp_path_factory) -> str:
    """The hash of the undisturbed run."""
    return fit(settings(tmp_path_factory.mktemp("quiet") / "run", 1)).state_hash


@pytest.mark.parametrize("care", ["yes", "no"])
def test_a_program_exits_with_75_and_its_process_group_may_be_signalled(tmp_path, quiet, care):
    folder, number = tmp_path / "run", signal.SIGTERM
    step = random.Random(number).randint(2, STEPS - 6)
    with program(folder, "2", f"hold={step + 4}", f"care={care}") as process:
        wait_for_step(folder, step, process)
        with watch(family(process, folder)) as processes:
            os.killpg(process.pid, number)
            out, err = process.communicate(timeout=60)
            assert process.returncode == paceline.STOPPED_EXIT_CODE, err
            assert all_gone(processes, 10)
    assert out == ""
    at = steps_of(folder)[-1]
    assert f"stopped after step {at} ({number.name}); version " in err
    assert len(err.splitlines()) == 1
    assert fit(settings(folder, 3, resume="auto")).state_hash == quiet


def has_ended_by_another(process: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Send a signal once more; return whether the program has ended."""
    process.send_signal(number)
    return process.poll() is not None


@pytest.mark.parametrize("care", ["yes", "no"])
def test_the_second_signal_exits_at_once_and_leaves_no_process(tmp_path, quiet, care):
    folder = tmp_path / "run"
    never = tmp_path / "never"
    with program(folder, "2", "hold=6", f"until={never}", f"care={care}") as process:
        wait_for_step(folder, 6, process)
        with watch(family(process, folder)) as processes:
            process.send_signal(signal.SIGTERM)
            if care == "no":
                wait_for((folder / "stop").exists)
                assert process.poll() is None
                process.send_signal(signal.SIGUSR1)
            else:  # soon after the first it is the same request
                wait_for(lambda: has_ended_by_another(process, signal.SIGUSR1))
            process.communicate(timeout=60)
            # Python may see both at once, and then takes the one with the lower number first.
            assert process.returncode in {128 + signal.SIGUSR1, 128 + signal.SIGTERM}
            assert all_gone(processes, 10)
    assert fit(settings(folder, 1, resume="auto")).state_hash == quiet


@pytest.mark.parametrize("seed", range(2))
def test_every_process_is_killed_and_the_run_goes_on_elsewhere(tmp_path, quiet, seed):
    folder = tmp_path / "run"
    choice = random.Random(seed)
    step, workers, later = choice.randint(5, STEPS - 4), *choice.sample([1, 2, 3, 4], 2)
    with program(folder, str(workers), f"hold={step + 2}", f"until={tmp_path / 'never'}") as process:
        wait_for_step(folder, step, process)
        pids = family(process, folder)
        with watch(pids) as processes:
            for pid in choice.sample(pids, len(pids)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert all_gone(processes, 10)
        assert process.wait(10) == -signal.SIGKILL
    assert fit(settings(folder, later, resume="auto")).state_hash == quiet


def test_when_the_program_alone_is_killed_its_workers_end(tmp_path, quiet):
    folder = tmp_path / "run"
    with program(folder, "2", "hold=7", f"until={tmp_path / 'never'}") as process:
        wait_for_step(folder, 7, process)
        with watch(family(process, folder)) as processes:
            process.kill()
            assert all_gone(processes, 10)
    assert fit(settings(folder, 4, resume="auto")).state_hash == quiet


@pytest.mark.parametrize("to", ["one rank", "the launcher"])
def test_inside_torchrun(tmp_path, quiet, to):
    folder, go = tmp_path / "run", tmp_path / "go"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    until = f"until={go if to == 'one rank' else ''}"
    with program(folder, "2", "hold=9", until, command=[*torchrun, "tests.train.small_run"]) as process:
        wait_for_step(folder, 9, process)
        ranks = workers_of(folder)
        with watch([process.pid, *ranks.values()]) as processes:
            os.kill(ranks[1] if to == "one rank" else process.pid, signal.SIGTERM)
            go.touch()
            _, err = process.communicate(timeout=60)
            assert all_gone(processes, 10)
    at = steps_of(folder)[-1]
    assert 9 <= at < STEPS
    assert f"stopped after step {at} (" in err
    if to == "one rank":
        assert "exitcode  : 75" in err
    assert fit(settings(folder, 3, resume="auto")).state_hash == quiet
    *_, ended = (event for event in small_run.journal_of(folder) if isinstance(event, events.RunEnded))
    assert ended.reason == "finished"


def test_a_signal_to_every_process_of_the_job(tmp_path, quiet):
    """As a scheduler does that knows the processes of a job and not who started whom: a program that started
    others passes the same signal on."""
    folder = tmp_path / "run"
    with program(folder, "2", "hold=10") as process:
        wait_for_step(folder, 6, process)
        pids = family(process, folder)
        with watch(pids) as processes:
            for pid in random.Random(0).sample(pids, len(pids)):
                os.kill(pid, signal.SIGTERM)
            process.send_signal(signal.SIGUSR1)  # of another number, so that the kernel does not merge them
            _, err = process.communicate(timeout=60)
            assert process.returncode == paceline.STOPPED_EXIT_CODE, err
            assert all_gone(processes, 10)
    assert fit(settings(folder, 3, resume="auto")).state_hash == quiet
