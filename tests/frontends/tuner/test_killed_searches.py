"""kill -9 of a trial, of the fork server, of the search, Ctrl-C: nothing is left, no trial is lost or counted
twice, and the same trials are asked for."""

from __future__ import annotations

import functools
import os
import signal

import pytest
from tests.frontends.tuner import trial_functions
from tests.frontends.tuner.inline_trials import outcome
from tests.waiting import wait_for

import paceline
from paceline.core.process_state import has_ended, stat_fields
from paceline.frontends.tuner.tuning_study import StoredStudy

X = {"x": paceline.tune.uniform(-3, 3)}


def tuner(function, folder, **more) -> paceline.DistributedTuner:
    return paceline.DistributedTuner(function, X, num_gpus=2, seed=4, study=folder / "study", **more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The first 8 trials of an undisturbed search with the same seed."""
    search = tuner(trial_functions.quadratic, tmp_path_factory.mktemp("undisturbed"), verbose=False)
    search.tune(8)
    return outcome(search.trials)


@pytest.mark.parametrize("target", ["self", "server"])
def test_a_killed_trial_is_repeated_and_counted_once(tmp_path, target, undisturbed, capfd):
    function = functools.partial(trial_functions.killed_once, folder=tmp_path, target=target)
    search = tuner(function, tmp_path)
    search.tune(8)
    assert (tmp_path / "killed").exists()
    (child,) = trial_functions.pids_in(tmp_path)
    wait_for(lambda: has_ended(child), "what the killed trial had started lived on")
    assert "trial 2 is repeated: its process" in capfd.readouterr().err
    # Its report before the kill is forgotten.
    assert all(trial.reports == {0: trial.params["x"]} for trial in search.trials)
    assert [one[:4] for one in outcome(search.trials)] == [one[:4] for one in undisturbed]
    calls = (tmp_path / "calls").read_text().split()
    assert set(calls) == {f"{number:04d}" for number in range(8)}
    if target == "self":
        assert len(calls) == 8


def test_a_trial_that_is_always_killed_fails_and_the_search_goes_on(tmp_path):
    def train(params):
        if paceline.tune.folder().name == "0001":
            with open(tmp_path / "attempts", "a") as attempts:
                attempts.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return params["x"]

    search = tuner(train, tmp_path, verbose=False)
    search.tune(4)
    assert [trial.state for trial in search.trials] == ["complete", "failed", "complete", "complete"]
    assert "was killed by signal 9 (SIGKILL); lost in 3 attempts" in search.trials[1].error
    assert (tmp_path / "attempts").read_text() == "xxx"


def parent_of(pid: int) -> int:
    return int(stat_fields(pid)[1])


def at_the_gate(folder):
    """Start a search whose trials 3 and 4 wait, and wait for them."""
    program = trial_functions.start_program(folder)
    wait_for(lambda: len(list(folder.glob("pid-*"))) == 2 or program.poll() is not None)
    assert program.poll() is None, program.communicate()
    return program, trial_functions.pids_in(folder)


def finish(folder):
    """Continue the search in this process, with the gate open."""
    (folder / "go").touch()
    search = tuner(functools.partial(trial_functions.gated, folder=folder), folder, verbose=False)
    search.tune(8, resume=True)
    return search


@pytest.mark.parametrize("with_server", [False, True], ids=["search", "search and server"])
def test_a_killed_search_is_continued(tmp_path, undisturbed, with_server):
    program, pids = at_the_gate(tmp_path)
    if with_server:
        # Halted, it sees nothing of the server's end: both are gone at once.
        program.send_signal(signal.SIGSTOP)
        left = [pid for pid in pids if os.getpgid(pid) != pid]
        pids = [pid for pid in pids if pid not in left]
        os.kill(parent_of(pids[0]), signal.SIGKILL)
    os.kill(program.pid, signal.SIGKILL)
    program.communicate()
    wait_for(lambda: all(map(has_ended, pids)), "trials outlived the search")
    if with_server:
        # No process was there to end what the trials had started.
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    states = [trial.state for trial in StoredStudy(tmp_path / "study").trials]
    assert states == ["complete"] * 3 + ["running"] * 2
    assert outcome(finish(tmp_path).trials) == undisturbed


def test_ctrl_c_leaves_nothing_running(tmp_path, undisturbed):
    program, pids = at_the_gate(tmp_path)
    program.send_signal(signal.SIGINT)
    text, _ = program.communicate(timeout=60)
    assert program.returncode in (130, -signal.SIGINT)
    assert "goes on with tune(..., resume=True)" in text
    assert all(map(has_ended, pids))
    assert outcome(finish(tmp_path).trials) == undisturbed


def test_one_search_at_a_time(tmp_path):
    program, _ = at_the_gate(tmp_path)
    try:
        assert StoredStudy(tmp_path / "study").is_running
        search = tuner(trial_functions.quadratic, tmp_path, verbose=False)
        with pytest.raises(paceline.UsageError, match=f"process {program.pid} on"):
            search.tune(8, resume=True)
    finally:
        (tmp_path / "go").touch()
        program.communicate(timeout=60)
    assert program.returncode == 0
    assert not StoredStudy(tmp_path / "study").is_running
