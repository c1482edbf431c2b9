"""Ctrl-C asks a run to finish its step and save; progress that cannot be shown ends nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.local.processes import all_gone, watch
from tests.frontends.training_programs import PROGRAM, family, program, wait_for_step
from tests.train.small_run import STEPS, fit, settings, steps_of

# A shell that starts pytest in the background has SIGINT ignored, and so would its children.
INTERRUPTIBLE = ["env", "--default-signal=INT", *PROGRAM]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fit(settings(tmp_path_factory.mktemp("quiet") / "run", 1)).state_hash


@pytest.mark.parametrize("care", ["yes", "no"])
def test_the_first_one_saves(tmp_path, quiet, care):
    folder = tmp_path / "run"
    with program(folder, "2", "hold=10", f"care={care}", command=INTERRUPTIBLE) as process:
        wait_for_step(folder, 7, process)
        with watch(family(process, folder)) as processes:
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert all_gone(processes, 10)
    # As shells expect it of a program that was interrupted.
    assert process.returncode == -signal.SIGINT, err
    at = steps_of(folder)[-1]
    assert 7 <= at < STEPS
    assert f"stopped after step {at} (Ctrl-C); version " in err
    assert f"KeyboardInterrupt: stopped by Ctrl-C after step {at}" in err
    assert 'resume="auto"' in err
    assert err.count("/paceline/") == 1, err  # one frame of ours
    assert fit(settings(folder, 3, resume="auto")).state_hash == quiet
    assert len(set(steps_of(folder))) == len(steps_of(folder))


@pytest.mark.parametrize("care", ["yes", "no"])
def test_the_second_one_ends_at_once(tmp_path, quiet, care):
    folder = tmp_path / "run"
    words = ("2", "hold=6", f"until={tmp_path / 'never'}", f"care={care}")
    with program(folder, *words, command=INTERRUPTIBLE) as process:
        wait_for_step(folder, 6, process)
        with watch(family(process, folder)) as processes:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)  # Python may see both at once
            with_time = 20
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=with_time)
            assert process.returncode == -signal.SIGINT
            assert all_gone(processes, 10)
    assert fit(settings(folder, 1, resume="auto")).state_hash == quiet


SHOWS = """
import sys
from pathlib import Path
from tests.train.small_run import fit, settings
if __name__ == "__main__":
    history = fit(settings(Path(sys.argv[1]), 2, progress=True, log_every=1))
    Path(sys.argv[2]).write_text(history.state_hash)
    print("done")
"""


@pytest.mark.parametrize("where", ["full disk", "closed pipe", "closed"])
def test_progress_that_cannot_be_written(tmp_path, quiet, where):
    script = tmp_path / "shows.py"
    script.write_text(SHOWS)
    line = f'exec "{sys.executable}" "{script}" "{tmp_path / "run"}" "{tmp_path / "hash"}"'
    redirect = {"full disk": "2>/dev/full", "closed": "2>&-", "closed pipe": "2> >(exec true)"}[where]
    done = subprocess.run(
        ["bash", "-c", f"{line} {redirect}"],
        timeout=100,
        check=False,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0
    assert done.stdout == b"done\n"  # the program's own output is left alone
    assert (tmp_path / "hash").read_text() == quiet


PRINTS = """
import sys
from pathlib import Path
import torch
from tests.train.small_run import fit, settings

def objective(model, batch):
    print("a batch of", len(batch[0]), flush=True)
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

if __name__ == "__main__":
    history = fit(settings(Path(sys.argv[1]), 2), objective=objective)
    Path(sys.argv[2]).write_text(history.state_hash)
"""


@pytest.mark.parametrize("where", [">/dev/full", "> >(exec head -n 1 >/dev/null)"])
def test_what_an_objective_prints_and_cannot_be_written(tmp_path, quiet, where):
    script = tmp_path / "prints.py"
    script.write_text(PRINTS)
    line = f'"{sys.executable}" "{script}" "{tmp_path / "run"}" "{tmp_path / "hash"}"'
    done = subprocess.run(
        ["bash", "-c", f"exec {line} {where}"],
        timeout=100,
        check=False,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hash").read_text() == quiet
