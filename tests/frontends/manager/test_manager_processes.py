"""The manager in real processes, of which some are killed with SIGKILL: those who are left end with the bits
of the undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.comm.transport.ranks import free_port
from tests.frontends.manager.manager_program import BATCH, train

import paceline

_PROGRAM = "tests.frontends.manager.manager_program"
_KILLED = -signal.SIGKILL

# What is killed when; each is to end like the first.
_KILLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the last rank, in forward": {"kills": [[2, "forward", 1]]},
    "rank 0, before the exchange": {"kills": [[0, "collective", 2]]},
    "rank 0, within the exchange": {"kills": [[0, "exchange 3", 1]]},
    "the last rank, within the exchange": {"kills": [[2, "exchange 2", 1]]},
    "rank 1, after the exchange": {"kills": [[1, "optimizer", 1]]},
    "two, one after the other: one is left": {"kills": [[0, "forward", 1], [1, "forward", 2]]},
    "one more while the others repair": {"kills": [[2, "forward", 1], [1, "repair", 0]]},
    "rank 0, on another host": {"kills": [[0, "collective", 1]], "hosts": True},
}


def _reports(scenarios: list[dict[str, Any]]) -> list[list[Any]]:
    with free_port() as port:
        done = subprocess.run(
            [sys.executable, "-m", _PROGRAM, json.dumps(scenarios), str(port)],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    reports: list[list[Any]] = json.loads(done.stdout)
    assert not any(report == 1 for one in reports for report in one), done.stderr
    return reports


def _only(reports: list[Any], key: str) -> Any:
    """What all survivors report."""
    (found,) = {json.dumps(one[key]) for one in reports if isinstance(one, dict)}
    return json.loads(found)


def test_killed_processes_leave_no_trace(tmp_path: Path) -> None:
    saving = {"settings": {"checkpoint_dir": str(tmp_path / "made-up")}, "save": 1, "kills": [[0, "save", 1]]}
    scenarios = [{"world": 3, **kills} for kills in _KILLS.values()]
    *found, saved, continued, more, lonely = _reports(
        [
            *scenarios,
            {"world": 3, **saving},
            {"world": 2, "load": 1, "settings": saving["settings"]},
            {"world": 5, "load": 1, "settings": saving["settings"]},  # more than there are shards
            {"world": 2, "steps": 1, "environment": {"TORCHELASTIC_RUN_ID": "1"}},
        ]
    )
    undisturbed = _only(found[0], "hash")
    for name, reports in zip(_KILLS, found, strict=True):
        dead = [rank for rank, *_ in _KILLS[name].get("kills", ())]
        assert [rank for rank, one in enumerate(reports) if one == _KILLED] == sorted(dead), name
        assert _only(reports, "hash") == undisturbed, name
        assert _only(reports, "losses") == _only(found[0], "losses"), name
        assert _only(reports, "world_size") == 3 - len(dead), name
        ranges = sorted(one["ranges"][-1] for one in reports if one != _KILLED)
        assert [ranges[0][0], ranges[-1][1]] == [0, BATCH], name
        assert all(before[1] == after[0] for before, after in pairwise(ranges)), name
        if dead:
            assert _only(reports, "lost")[0] == dead[0], name
    # The checkpoint that rank 0 died over was saved by the next rank, whose save_checkpoint had returned 0.
    assert _only(saved, "hash") == undisturbed
    assert _only(continued, "hash") == _only(more, "hash") == undisturbed
    assert [0, 0] in [[end - start for start, end in one["ranges"]] for one in more]
    # A launcher that ends the survivors of a failure is named, once, before there is one.
    assert [sum("torchrun ends all" in line for line in one["said"]) for one in lonely] == [1, 0]


def _start_with(ctx: paceline.DistributedContext, settings: list[dict[str, Any]]) -> str:
    """Take two steps and return the error of this rank, with all of its traceback."""
    try:
        train(ctx.rank, {"settings": settings[ctx.rank], "steps": 3})
    except paceline.PacelineError as error:
        return "".join(traceback.format_exception(error))
    return ""


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"batch_size": 12, "shards": 4}, "rank 1 has other settings than rank 0: batch_size: 24 -> 12\n"),
        ({"learning_rate": 0.5}, "after step 1 the 2 ranks hold 2 different states"),
    ],
    ids=["refused before the first step", "found in the second"],
)
def test_processes_with_different_settings(odd: dict[str, Any], said: str) -> None:
    for text in paceline.spawn(_start_with, [{"shards": 4}, odd], workers=2):
        assert said in text
        assert text.count("Traceback") == 1


_FORGETS_TO_CLOSE = f"""
from {_PROGRAM} import model
import paceline
manager = paceline.DistributedTrainingManager({{"world_size": 1, "local_rank": 0}})
manager.init_environment()
manager.prepare_training(model(), 96)
raise SystemExit("the program's own end")
"""


def test_a_program_that_ends_without_close_says_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORGETS_TO_CLOSE], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "the program's own end"
    assert "Exception ignored" not in done.stderr


_MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--enable-recovery", "-n", "2", sys.executable)
_PACELINE = (sys.executable, "-m", "paceline", "run", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            _MPIRUN,
            marks=[
                pytest.mark.mpi,
                pytest.mark.skipif(
                    shutil.which("mpirun") is None, reason="no mpirun: apt-get install openmpi-bin"
                ),
            ],
            id="mpirun",
        ),
        pytest.param(_PACELINE, id="paceline-run"),
    ],
)
def test_launchers_that_let_survivors_live(launcher: tuple[str, ...]) -> None:
    scenario = {"kills": [[0, "forward", 1]], "settings": {"shards": 2}}
    done = subprocess.run(
        [*launcher, "-m", _PROGRAM, "--one", json.dumps(scenario)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    reports = [line.partition("REPORT ")[2] for line in done.stdout.splitlines() if "REPORT " in line]
    assert len(reports) == 1, done.stdout + done.stderr
    report = json.loads(reports[0])
    alone = train(0, {"settings": {"world_size": 1, "local_rank": 0, "shards": 2}})
    assert report["lost"] == [0]
    assert report["world_size"] == 1
    assert report["hash"] == alone["hash"]
    assert not [line for line in report["said"] if "ends all processes" in line]
