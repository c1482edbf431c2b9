"""An engine where something else has the workers, or where every rank of a job would start a run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.session_parts import X, Y, build, config
from tests.one_thread import one_thread as one_thread
from torch import nn

import paceline
from paceline.comm import default_group
from paceline.comm.context import DistributedContext
from paceline.core.errors import ConfigError, UsageError
from paceline.frontends import mpi_calls, overrides
from paceline.frontends.engine_refusals import check_search, refuse_engine_on_ranks
from paceline.frontends.framework_trainers.framework_settings import FrameworkSettings
from paceline.frontends.mpi_calls import MpiRanks
from paceline.frontends.mpi_meeting import MeetingPlace
from paceline.frontends.overrides import Command, Overrides
from paceline.frontends.spawn import spawn
from paceline.testing.process_engine import ProcessEngine

ENGINE = ProcessEngine(nodes=2)
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
SRUN = {**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}


def of_engine(**given: Any) -> paceline.Trainer:
    return paceline.Trainer(
        build,
        nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        config=config(engine=ENGINE, **given),
    )


def test_a_session_refuses_an_engine_of_its_settings_and_of_the_command_line(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    refused = pytest.raises(ConfigError, match="engine=process in a session, which trains in the ranks")
    with refused, paceline.session(model, optimizer, config(engine=ENGINE, run_dir=tmp_path)):
        pass
    with (
        overrides.in_force(Overrides({"engine": ENGINE})),
        refused,
        paceline.session(model, optimizer, config(run_dir=tmp_path)),
    ):
        pass


def test_the_orchestrator_refuses_an_engine_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[engine]\nname = "ssh"\nhosts = ["a", "b"]\n')
    for given, name in (
        (Overrides({"engine": ENGINE, "workers": 2}), "process"),
        (Overrides(file=str(file)), "ssh"),
    ):
        with (
            overrides.in_force(given),
            pytest.raises(ConfigError, match=f"engine={name} for the orchestrator, whose workers are"),
        ):
            paceline.DistributedTrainingOrchestrator(num_workers=2)
    with overrides.in_force(Overrides({"workers": 3})):
        assert paceline.DistributedTrainingOrchestrator(num_workers=2).num_workers == 3
        assert overrides.applied()


def test_trainers_of_other_frameworks_refuse_an_engine_of_the_command_line() -> None:
    with (
        overrides.in_force(Overrides({"engine": ENGINE, "workers": 2})),
        pytest.raises(
            ConfigError, match="engine=process for a trainer on horovod, which has its own workers"
        ),
    ):
        FrameworkSettings(None, "horovod", checkpoint_dir=None, resume=False)


def fits_on_a_rank(context: DistributedContext, folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        of_engine(run_dir=folder).fit((X, Y))
    return caught.value.message


def test_each_rank_of_a_job_is_refused(tmp_path: Path) -> None:
    told = spawn(fits_on_a_rank, tmp_path / "run", workers=2, threads=1, timeout=60)
    assert told == ["engine=process inside a job of 2 ranks, each of which would start a run on it"] * 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_launchers_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="engine=process inside a job of 4 ranks"):
        getattr(of_engine(run_dir=tmp_path / "run"), call)((X, Y))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variables", "train", "refused"),
    [
        (TORCHRUN, True, True),
        (SRUN, False, True),
        (SRUN, True, False),  # the first task of `srun paceline train`; the others wait
        (SBATCH, False, False),
        (SBATCH, True, False),
        ({**SBATCH, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, False, False),  # salloc
        ({"MASTER_ADDR": "somewhere"}, False, False),
        ({}, False, False),
    ],
)
def test_ranks_are_told_from_scripts_that_are_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], train: bool, refused: bool
) -> None:
    for name in {*TORCHRUN, *SRUN}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = Command("/x/script.py", (), "/x") if train else None
    with overrides.in_force(Overrides(command=command)):
        if refused:
            with pytest.raises(UsageError, match="inside a job of 4 ranks"):
                refuse_engine_on_ranks(ENGINE)
        else:
            refuse_engine_on_ranks(ENGINE)


def test_a_group_of_one_is_no_job() -> None:
    with DistributedContext(1, 0) as context, default_group.offering(context):
        refuse_engine_on_ranks(ENGINE)


def test_the_micro_batch_of_other_machines_is_not_searched_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ConfigError, match=r'micro_batch="auto" on process: .* memory of this machine'
    ) as caught:
        of_engine(run_dir=tmp_path / "run", micro_batch="auto").fit((X, Y))
    assert caught.value.remedy == "give micro_batch a number"
    assert not (tmp_path / "run").exists()
    for on_one_host in (True, False):
        ranks = MpiRanks(MeetingPlace(0, 2, on_one_host, "job@1", {}), leads=True)
        monkeypatch.setattr(mpi_calls, "current", lambda ranks=ranks: ranks)
        searching = config(engine=paceline.Mpi(nodes=2), micro_batch="auto")
        if on_one_host:
            check_search(searching)
        else:
            with pytest.raises(ConfigError, match="on mpi"):
                check_search(searching)
