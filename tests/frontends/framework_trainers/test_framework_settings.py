"""Settings and bad input of trainers on other frameworks, where none of these is needed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.frontends import overrides
from paceline.frontends.framework_trainers.framework_settings import FrameworkSettings, require_package
from paceline.frontends.framework_trainers.horovod_job import device_of_rank, refuse_other_launchers
from paceline.frontends.framework_trainers.tensorflow_cluster import (
    met_by_ranks,
    named_by_environment,
    named_by_resolver,
)


def settings(given: Any = None, backend: str = "horovod", resume: Any = False) -> FrameworkSettings:
    return FrameworkSettings(given, backend, checkpoint_dir=None, resume=resume)


def test_settings_count_all_workers_together() -> None:
    made = settings(paceline.DistributedConfig(epochs=4, gradient_accumulation_steps=2)).train_config(
        3, 8, None
    )
    assert (made.workers, made.global_batch, made.epochs, made.mode) == (3, 48, 4, "fast")
    assert (made.name, made.resume) == ("horovod", None)
    assert settings(resume=True).train_config(1, 8, 7).epochs == 7
    assert settings(resume=True).train_config(1, 8, 7).resume == "auto"


def test_what_paceline_train_sets_wins() -> None:
    with overrides.in_force(overrides.Overrides({"epochs": 9}, ("per_gpu.learning_rate=0.5",))):
        chosen = settings()
        assert chosen.config.learning_rate == 0.5
        assert chosen.train_config(2, 8, 3).epochs == 9
        assert overrides.applied()
    with (
        overrides.in_force(overrides.Overrides({"workers": 4})),
        pytest.raises(ConfigError, match="workers=4, and horovod has 2 workers: its own launcher decides"),
    ):
        settings().train_config(2, 8, 3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"config": {"backend": "tensorflow"}},
            'backend="tensorflow" in the settings of a trainer on horovod',
        ),
        ({"config": 3}, "config is an int"),
        ({"resume_from_checkpoint": "latest"}, "resume_from_checkpoint is a str"),
        ({"config": {"mixed_precision": True}}, "mixed_precision=True has no meaning under horovod"),
        ({"lr_rule": "cubic"}, "lr_rule='cubic' is no rule"),
        ({"commit_steps": 0}, "commit_steps=0"),
        ({"optimizer": 3}, "the optimizer is 3"),
    ],
)
def test_bad_settings_of_the_horovod_trainer(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        paceline.HorovodTrainer(nn.Linear(1, 1), **given)


def test_epochs_are_checked() -> None:
    for epochs in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="epochs="):
            settings().train_config(1, 8, epochs)  # type: ignore[arg-type]


def test_a_missing_framework_says_what_to_install() -> None:
    with pytest.raises(UnavailableError, match="the package nothere is not installed") as found:
        require_package("nothere.torch", "pip install nothere")
    assert found.value.remedy == "pip install nothere"


@pytest.mark.skipif(find_spec("horovod") is not None, reason="Horovod is installed here")
def test_the_horovod_trainer_without_horovod() -> None:
    with pytest.raises(UnavailableError, match="the package horovod is not installed") as found:
        paceline.HorovodTrainer(nn.Linear(1, 1))
    assert ".ci/install-horovod" in found.value.remedy


@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="TensorFlow is installed here")
def test_the_tensorflow_trainer_without_tensorflow() -> None:
    with pytest.raises(UnavailableError, match="the package tensorflow is not installed") as found:
        paceline.TensorFlowDistributedTrainer(lambda: None)
    assert "pip install tensorflow" in found.value.remedy


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model_fn": None}, "model_fn is a NoneType"),
        ({"model_fn": 3}, "model_fn is an int"),
        ({"strategy": "central"}, "strategy='central' is unknown"),
        ({"parameter_servers": 0}, "parameter_servers=0"),
        ({"config": {"learning_rate": 0.5}}, "learning_rate=0.5 has no meaning under tensorflow"),
    ],
)
def test_bad_settings_of_the_tensorflow_trainer(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        paceline.TensorFlowDistributedTrainer(**{"model_fn": lambda: None, **given})


def tf_config(role: str, index: int, **jobs: int) -> dict[str, str]:
    cluster = {job: [f"{job}{number}:1" for number in range(count)] for job, count in jobs.items()}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}


def test_roles_of_a_cluster() -> None:
    assert named_by_environment({}) is None
    worker = named_by_environment(tf_config("worker", 1, worker=3))
    assert worker is not None
    assert (worker.rank, worker.workers, worker.is_chief) == (1, 3, False)
    served = named_by_environment(tf_config("worker", 1, chief=1, ps=2, worker=4))
    assert served is not None
    assert (served.rank, served.workers, served.is_chief) == (4, 4, False)
    chief = named_by_environment(tf_config("chief", 0, chief=1, worker=2))
    assert chief is not None
    assert (chief.rank, chief.workers, chief.is_chief) == (0, 3, True)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG cannot be understood"),
        ({"TF_CONFIG": '{"cluster": {}}'}, "TF_CONFIG cannot be understood: KeyError"),
        (tf_config("worker", 3, worker=2), "this process is worker 3, and the cluster has 2 workers"),
        (tf_config("evaluator", 0, worker=2), "this process is evaluator 0"),
    ],
)
def test_a_cluster_that_cannot_be(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        named_by_environment(environment)


def test_too_few_processes_for_a_strategy() -> None:
    with pytest.raises(UsageError, match='strategy="parameter_server" needs 4 processes at least') as found:
        met_by_ranks("parameter_server", 2, {})
    assert "--nproc-per-node 4" in found.value.remedy
    with pytest.raises(
        UsageError, match='strategy="multiworker" needs 2 processes at least, and this job has 1'
    ):
        met_by_ranks("multiworker", 1, {})


@pytest.mark.parametrize(
    ("jobs", "role", "index", "expected"),
    [
        ({"worker": ["a:1", "b:1"]}, "worker", 1, (1, 2)),
        ({"chief": ["a:1"], "worker": {0: "b:1", 1: "c:1"}}, "worker", 0, (1, 3)),
    ],
)
def test_the_cluster_of_a_resolver(
    jobs: dict[str, Any], role: str, index: int, expected: tuple[int, int]
) -> None:
    """As TensorFlow's resolvers for SLURM and others have it, without TF_CONFIG."""
    found = named_by_resolver(Resolver(jobs, role, index))
    assert found is not None
    assert (found.rank, found.workers) == expected


def test_a_resolver_that_names_no_process_or_not_this_one() -> None:
    assert named_by_resolver(None) is None
    assert named_by_resolver(Resolver({}, None, None)) is None
    with pytest.raises(UsageError, match="Resolver: this process is worker 2, and the cluster has 1 worker"):
        named_by_resolver(Resolver({"worker": ["a:1"]}, "worker", 2))


class Resolver:
    """A cluster resolver as TensorFlow has them."""

    def __init__(self, jobs: dict[str, Any], role: str | None, index: int | None) -> None:
        self.task_type, self.task_id, self._jobs = role, index, jobs

    def cluster_spec(self) -> Resolver:
        return self

    def as_dict(self) -> dict[str, Any]:
        return self._jobs


def test_ranks_that_horovod_does_not_know_are_refused() -> None:
    """Over MPI it knows those of mpirun, which has no variable of Horovod's."""
    several_hosts = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
    refuse_other_launchers(several_hosts | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, 2)
    one_host = several_hosts | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    refuse_other_launchers(one_host | {"HOROVOD_RANK": "0"}, 1)  # of horovodrun, in another launcher's task
    refuse_other_launchers({}, 1)
    with pytest.raises(UsageError, match=r"rank 1 of 2 \(OpenMPI\), of which Horovod knows nothing") as found:
        refuse_other_launchers(one_host, 1)
    assert "horovodrun -np 2 --gloo" in found.value.remedy


@pytest.mark.parametrize(
    ("gpus", "is_built", "local_rank", "expected"),
    [
        (0, True, 1, "cpu"),
        (4, True, 1, "cuda:1"),
        (1, True, 3, "cuda:0"),  # the launcher shows every rank its own
        (4, False, 1, "cpu"),
    ],
)
def test_the_gpu_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: int,
    is_built: bool,
    local_rank: int,
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    hvd = SimpleNamespace(
        cuda_built=lambda: is_built, rocm_built=lambda: False, local_rank=lambda: local_rank
    )
    assert str(device_of_rank(hvd)) == expected
    assert ("Horovod was built without GPUs" in "".join(capsys.readouterr())) == (not is_built)
