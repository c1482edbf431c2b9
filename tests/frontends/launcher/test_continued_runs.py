"""Runs that the ranks of a launcher train themselves: all ranks start again after a kill, and go on with the
run from its last checkpoint, although the script says nothing of resuming."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.frontends.launcher.launched import launched, write
from tests.train.small_run import STEPS, UNATTENDED, adam, build, data, fit, journal_of, settings, steps_of
from torch import nn

import paceline
from paceline.core import events

TRAINER = """
    trained = trainer(settings(folder, fault_tolerance=UNATTENDED), [Dies()])
    print(trained.fit(data(), data()).state_hash)
"""

SESSION = """
    import torch
    torch.manual_seed(5)
    model = build()
    with paceline.session(model, adam(model.parameters()), settings(folder), callbacks=[Dies()]) as run:
        for micro in run.microbatches(data()):
            run.backward(torch.nn.functional.cross_entropy(model(micro.x), micro.y))
    print(paceline.state_hash(model))
"""

START = """
    import os, sys
    from pathlib import Path
    import paceline
    from paceline.train.callbacks import Modifier
    from tests.train.small_run import UNATTENDED, adam, build, data, settings, trainer

    folder, last_restart = Path(sys.argv[1]), int(sys.argv[2])

    class Dies(Modifier):
        def stop(self, record):
            restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if restart < last_restart and os.environ["RANK"] == "1" and record.step == 6 + restart:
                os.kill(os.getpid(), 9)
"""


def alone(folder: Path) -> str:
    """Return the hash of the session in this process alone."""
    import torch

    torch.manual_seed(5)
    model = build()
    with paceline.session(model, adam(model.parameters()), settings(folder, 1)) as run:
        for micro in run.microbatches(data()):
            run.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
    return paceline.state_hash(model)


@pytest.mark.parametrize("program", ["trainer", "session"])
def test_a_run_goes_on_after_all_ranks_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], program: str
) -> None:
    source = START + (TRAINER if program == "trainer" else SESSION)
    done = launched(capfd, write(tmp_path, source), tmp_path / "run", 2, nproc_per_node=2)
    assert done.code == 0, done.err
    once = tmp_path / "once"
    quiet = (
        alone(once) if program == "session" else fit(settings(once, 1, fault_tolerance=UNATTENDED)).state_hash
    )
    assert [done.of(rank)[-1] for rank in range(2)] == [quiet, quiet]
    assert sum("all 2 ranks start again" in line for line in done.said) == 2
    resumed = [event.step for event in journal_of(tmp_path / "run") if isinstance(event, events.RunResumed)]
    assert len(resumed) == 2
    assert min(resumed) >= 4  # the first checkpoint
    assert sorted(set(steps_of(tmp_path / "run"))) == list(range(1, STEPS + 1))
