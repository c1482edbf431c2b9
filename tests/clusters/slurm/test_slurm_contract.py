"""The contract of engines, on jobs of a real SLURM cluster."""

from __future__ import annotations

import pytest
from tests.clusters.slurm.slurm_lab import AllocationLab, SlurmLab

from paceline.testing import engine_contract


@pytest.mark.timeout(200)
def test_worker_agent_and_node_are_lost_and_a_node_is_added(cluster, tmp_path):
    run = engine_contract.check_faults(SlurmLab(cluster, tmp_path, usable=2), tmp_path)
    assert "SLURM says NODE_FAIL" in run.output


@pytest.mark.timeout(200)
def test_stop_and_resume_on_another_number_of_nodes(cluster, tmp_path):
    lab = SlurmLab(cluster, tmp_path)
    run = engine_contract.check_stop_and_resume(lab, tmp_path)
    assert "] joined the job at 10.77.0.1:" in run.output
    assert not lab.left_files()


@pytest.mark.timeout(200)
def test_the_caller_is_killed(cluster, tmp_path):
    lab = SlurmLab(cluster, tmp_path)
    engine_contract.check_caller_killed(lab, tmp_path)
    assert not lab.left_files()  # the second caller removes what the first had to leave


@pytest.mark.timeout(200)
def test_steps_of_an_allocation_are_lost_and_replaced(cluster, tmp_path):
    run = engine_contract.check_faults(AllocationLab(cluster, tmp_path), tmp_path)
    assert "its agent was ended by signal 9" in run.output
    assert "SLURM does not reach it" in run.output
