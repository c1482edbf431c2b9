"""A group that goes back to a checkpoint: while the run concludes, before there is a checkpoint, and while it
is asked to stop. Compression's residuals are state that only one worker has: a lost worker sends all back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.train.small_run import STEPS, UNATTENDED, fit, journal_of, settings, steps_of

import paceline
from paceline.core import events
from paceline.monitor.audit import audit
from paceline.train.settings.train_config import GradientCompression, TrainConfig


def compressed(folder: Path, workers: int, chaos: str | None = None) -> TrainConfig:
    care = paceline.FaultTolerance(chaos=chaos, enabled=workers > 1, max_worker_failures=10, backoff=0.01)
    config = settings(folder, workers, compression=GradientCompression(kind="int8"), fault_tolerance=care)
    return dataclasses.replace(config, evaluate_every=STEPS - 3)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fit(compressed(tmp_path_factory.mktemp("undisturbed") / "run", 1)).state_hash


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_worker_lost_in_the_last_evaluation_does_not_end_the_run_early(
    tmp_path: Path, undisturbed: str, rank: int
) -> None:
    folder = tmp_path / "run"
    history = fit(compressed(folder, 3, f"kill rank={rank} step={STEPS - 1} phase=evaluation"))
    assert [record.step for record in history.steps] == list(range(1, STEPS + 1))
    assert history.state_hash == undisturbed
    assert any(isinstance(event, events.RunResumed) for event in journal_of(folder)), "nothing was done again"
    assert max(steps_of(folder)) == STEPS


def test_workers_that_start_over_for_another_ones_sake_have_not_failed(
    tmp_path: Path, undisturbed: str
) -> None:
    folder = tmp_path / "run"
    lives = "; ".join(f"kill rank=1 step=2 phase=forward attempt={life}" for life in (1, 2, 3))
    assert fit(compressed(folder, 2, lives)).state_hash == undisturbed
    causes = [(one.rank, one.cause) for one in journal_of(folder) if isinstance(one, events.WorkerFailed)]
    assert causes.count((1, "crash")) == 3
    assert {cause for rank, cause in causes if rank == 0} == {"restart"}


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_killed_after_the_last_step_and_before_the_result_leave_no_trace(
    tmp_path: Path, workers: int
) -> None:
    expected = fit(settings(tmp_path / "alone", 1, fault_tolerance=UNATTENDED))
    care = paceline.FaultTolerance(chaos=f"kill rank=all step={STEPS} phase=wait")
    history = fit(settings(tmp_path / "run", workers, fault_tolerance=care))
    injected = [one for one in journal_of(tmp_path / "run") if isinstance(one, events.FaultInjected)]
    assert len(injected) == workers
    assert history.state_hash == expected.state_hash
    assert [one.loss for one in history.steps] == [one.loss for one in expected.steps]
    proof = audit(journal_of(tmp_path / "run"))
    assert proof.wrong == ()
