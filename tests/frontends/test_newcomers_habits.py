"""What people bring from other libraries: it works, or the first error says what is meant here."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.one_thread import one_thread as one_thread
from tests.train.small_run import UNATTENDED, adam, build, data, settings, steps_of, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import paceline
from paceline.comm import tensor_pickling
from paceline.comm.context import DistributedContext
from paceline.core import config as core_config
from paceline.core.errors import ConfigError, UsageError
from paceline.engines.local import memfd_pickle
from paceline.frontends import run_preparation
from paceline.frontends.orchestrator.orchestrator_config import read_config
from paceline.frontends.overrides import Overrides
from paceline.train.loop import worker_jobs


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    net: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    parametrizations.weight_norm(net[0])
    parametrize.register_parametrization(net[1], "weight", Symmetric())
    parametrizations.spectral_norm(net[2])
    parametrize.register_parametrization(net[2], "bias", nn.Identity())
    return net  # type: ignore[no-any-return]


@pytest.mark.parametrize("built", [False, True])
def test_parametrized_models_are_trained_evaluated_and_trained_again(tmp_path: Path, built: bool) -> None:
    """torch does not pickle them: `fit` of a function worked, everything after it was refused."""
    torch.manual_seed(0)
    config = settings(tmp_path / "a", epochs=1, fault_tolerance=UNATTENDED)
    mine = trainer(config, model=parametrized() if built else parametrized)
    mine.fit(data())
    assert isinstance(mine.model, nn.Module)
    assert parametrize.is_parametrized(mine.model.get_submodule("2"), "bias")
    x, _ = data()
    torch.testing.assert_close(mine.predict(x), mine.model.eval()(x), rtol=1e-5, atol=1e-6)
    assert set(mine.evaluate(data())) == {"loss", "accuracy"}
    mine.config = dataclasses.replace(config, run_dir=str(tmp_path / "b"))
    again = mine.fit(data())
    alone = trainer(
        dataclasses.replace(mine.config, workers=1, run_dir=str(tmp_path / "c")), model=mine.model
    )
    assert again.steps
    assert alone.fit(data()).steps


def test_a_parametrized_module_travels_whole() -> None:
    net: Any = parametrized()
    shared = nn.ModuleDict({"a": net, "b": net[1]})
    descriptor = memfd_pickle.dump(shared, reducers=tensor_pickling.reducers())
    back: Any = memfd_pickle.load(descriptor)
    os.close(descriptor)
    assert back["a"][1] is back["b"]
    assert type(back["b"]).__name__ == "ParametrizedLinear"
    x = torch.randn(2, 6)
    assert torch.equal(back["a"].eval()(x), net.eval()(x))
    back["a"](x).sum().backward()
    assert [n for n, _ in back.named_parameters()] == [n for n, _ in shared.named_parameters()]


class WithLoss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(6, 3), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.inner(x)
        return {
            "dict": {"loss": logits.mean(), "logits": logits},
            "only": {"loss": logits.mean()},
            "scalar": logits.mean(),
            "tuple": (logits, logits.mean()),
            "rows": (logits, logits.T),
        }[self.kind]


def predicted(kind: str, batch: int = 5) -> Any:
    config = paceline.TrainConfig(workers=1, shards=1, global_batch=batch, threads=1).resolved(1)
    job = worker_jobs.TrainJob(WithLoss(kind), nn.MSELoss(), None, config, data()[0])
    with DistributedContext(1, 0) as context:
        return worker_jobs.predict(context, job)


def test_predict_leaves_a_loss_out_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        outputs = predicted("dict")
    assert {name: tuple(value.shape) for name, value in outputs.items()} == {"logits": (54, 3)}
    assert "predict leaves out loss: one number for a whole batch" in caplog.text


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("scalar", r"returned one number for a batch of 5 samples"),
        ("only", r"returned one number as \['loss'\] for a batch of 5"),
        ("tuple", r"returned one number as \[1\]"),
        ("rows", r"returned a tensor of shape \(3, 5\) as \[1\]"),
    ],
)
def test_predict_refuses_outputs_without_a_row_for_each_sample(kind: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        predicted(kind)


def test_a_typo_in_the_first_run_does_not_use_up_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = settings(folder, epochs=1)

    def typo(model: nn.Module, batch: Any) -> Tensor:
        return F.cros_entropy(model(batch[0]), batch[1])  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(Exception, match="cros_entropy"):
        trainer(config, objective=typo).fit(data())
    assert (folder / "journal.jsonl").exists()
    trainer(config).fit(data())
    assert steps_of(folder) == [1, 2, 3, 4, 5]
    assert (folder / "failed-1" / "journal.jsonl").exists()
    with pytest.raises(UsageError, match="already holds a run"):
        trainer(config).fit(data())


def test_a_folder_in_which_something_happened_is_never_cleared(tmp_path: Path) -> None:
    """A version counts without a journal, and so does a run that still goes on."""
    folder = tmp_path / "run"
    config = settings(folder, epochs=1, workers=1).resolved(1)
    run_preparation.prepare(config, None)
    version = folder / "checkpoints" / "v00000001"
    version.mkdir()
    with pytest.raises(UsageError, match="already holds a run"):
        run_preparation.prepare(config, None)
    version.rmdir()
    from paceline.train.state.run_lock import held

    with held(folder / "lock", "x"), pytest.raises(UsageError, match="already holds a run"):
        run_preparation.prepare(config, None)
    run_preparation.prepare(config, None)
    assert (folder / "failed-1" / "config.toml").exists()


def test_final_loss_of_a_supervised_run_is_of_the_whole_epoch(tmp_path: Path) -> None:
    """After a resume in the middle of an epoch, too; `history.steps` are those of all starts."""
    whole = trainer(settings(tmp_path / "whole", workers=1, epochs=2)).fit(data())
    trainer(settings(tmp_path / "run", max_steps=8)).fit(data())
    resumed = trainer(settings(tmp_path / "run", epochs=2, resume="auto")).fit(data())
    assert resumed.state_hash == whole.state_hash
    assert [record.step for record in resumed.steps] == list(range(1, 11))
    assert resumed.final_loss == pytest.approx(whole.final_loss, rel=1e-12)


def nested(model: nn.Module, batch: Any) -> Tensor:
    paceline.Trainer(build, nn.CrossEntropyLoss(), optimizer=adam).fit(data())
    raise AssertionError


def nested_predict(model: nn.Module, batch: Any) -> Tensor:
    paceline.Trainer(build, nn.CrossEntropyLoss(), optimizer=adam).predict(data()[0])
    raise AssertionError


@pytest.mark.parametrize(("objective", "what"), [(nested, "fit"), (nested_predict, "predict")])
def test_a_run_inside_an_objective_is_refused(tmp_path: Path, objective: Any, what: str) -> None:
    with pytest.raises(UsageError, match=f"{what} was called inside a run"):
        trainer(settings(tmp_path / "run", fault_tolerance=UNATTENDED), objective=objective).fit(data())


def test_a_loss_of_output_and_target_is_told_the_rule() -> None:
    with pytest.raises(UsageError, match=r"looks like a loss of \(output, target\)"):
        trainer(paceline.TrainConfig(), objective=lambda out, target: F.mse_loss(out, target)).fit(data())
    config = paceline.TrainConfig(shards=1, threads=1, progress=False).resolved(1)
    job = worker_jobs.TrainJob(build(), lambda a, b: F.cross_entropy(a, b), adam, config, data())
    with DistributedContext(1, 0) as context, pytest.raises(TypeError, match="must be Tensor") as caught:
        worker_jobs.train(context, job)
    assert any("is called with (model, batch)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("lr", "torch.optim.AdamW"),
        ("batch_size", "use global_batch="),
        ("max_epochs", "use epochs="),
        ("optimizer", "give it to the Trainer: paceline.Trainer(optimizer="),
        ("epoch", "use epochs="),
        ("sheds", "did you mean shards?"),
    ],
)
def test_settings_by_names_of_other_libraries(name: str, remedy: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=f"TrainConfig has no setting '{name}'") as caught:
        paceline.TrainConfig(**given)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("lr", "torch.optim.AdamW"),
        ("batch_size", "config=paceline.TrainConfig(global_batch=...)"),
        ("epochs", "config=paceline.TrainConfig(epochs=...)"),
        ("max_epochs", "config=paceline.TrainConfig(epochs=...)"),
        ("criterion", "use objective="),
        ("train_dataset", "trainer.fit(train_data, val_data)"),
        ("callback", "did you mean callbacks?"),
    ],
)
def test_arguments_of_trainers_of_other_libraries(name: str, remedy: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=f"Trainer has no setting '{name}'") as caught:
        paceline.Trainer(build, nn.MSELoss(), optimizer=adam, **given)
    assert remedy in caught.value.remedy


PARTS = (
    paceline.CheckpointConfig,
    paceline.DynamicBatch,
    paceline.EarlyStopping,
    paceline.EvaluationConfig,
    paceline.FaultTolerance,
    paceline.GradientCompression,
    paceline.LossScaling,
)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("lr", "torch.optim.AdamW"),
        ("batch_size", "it belongs to TrainConfig: TrainConfig(global_batch=...)"),
        ("max_epochs", "it belongs to TrainConfig: TrainConfig(epochs=...)"),
    ],
)
def test_parts_of_the_settings_say_where_a_setting_belongs(part: type, name: str, remedy: str) -> None:
    if name in inspect.signature(part).parameters:
        return
    with pytest.raises(ConfigError, match=f"{part.__name__} has no setting '{name}'") as caught:
        part(**{name: 1})
    assert remedy in caught.value.remedy


@pytest.mark.parametrize("name", ["lr", "batch_size", "max_epochs"])
def test_a_launcher_leaves_training_to_the_script(name: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=f"LaunchConfig has no setting '{name}'") as caught:
        paceline.LaunchConfig(**given)
    assert "training is the script's" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "remedy"), [("lr", "use learning_rate=..."), ("max_epochs", "train_epoch trains one epoch")]
)
def test_context_trainers_by_names_of_other_libraries(name: str, remedy: str) -> None:
    given: dict[str, Any] = {name: 1}
    with paceline.DistributedContext(1, 0) as context:
        for kind in (paceline.DistributedNeuralNetTrainer, paceline.DistributedAdaptiveTrainer):
            with pytest.raises(ConfigError, match=f"{kind.__name__} has no setting '{name}'") as caught:
                kind(context, **given)
            assert remedy in caught.value.remedy


def test_an_environment_that_is_explained_shows_the_callers_frames_alone(monkeypatch: Any) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(UsageError, match="MASTER_ADDR is set in the environment") as caught:
        paceline.init_process_group()
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.filename for frame in frames] == [__file__]


def manager(**given: Any) -> None:
    paceline.DistributedTrainingManager(given)


def per_gpu(**given: Any) -> None:
    paceline.PyTorchDDPTrainer(build(), **given)


def orchestrated(**given: Any) -> None:
    read_config(given)


def of_file(**given: Any) -> None:
    core_config.load(paceline.TrainConfig, given)


def assigned(**given: Any) -> None:
    Overrides(assignments=tuple(f"{name}={value}" for name, value in given.items()))


DOORS: dict[str, Callable[..., object]] = {
    "TrainConfig": paceline.TrainConfig,
    "file": of_file,
    "--set": assigned,
    "TrainingConfig": paceline.TrainingConfig,
    "dict": orchestrated,
    "PyTorchDDPTrainer": per_gpu,
    "DistributedConfig": paceline.DistributedConfig,
    "manager": manager,
    "LaunchConfig": paceline.LaunchConfig,
}
ANSWERS = {
    ("TrainConfig", "file", "--set"): {
        "lr": "torch.optim.AdamW(p, 1e-3)",
        "learning_rate": "torch.optim.AdamW(p, 1e-3)",
        "batch_size": "use global_batch=",
        "n_epochs": "use epochs=",
        "num_epochs": "use epochs=",
        "max_epochs": "use epochs=",
        "gradient_clip_val": "use clip_norm=",
        "devices": "use workers=",
        "accumulate_grad_batches": "use micro_batch=..., the samples of one forward pass",
        "num_workers": "DataLoader(data, num_workers=...)",
        "save_steps": "CheckpointConfig(every_steps=...)",
        "fp16": 'precision="fp16"',
        "output_dir": "use run_dir=",
        "fast_dev_run": "use dry_run=",
    },
    ("TrainingConfig", "dict"): {
        "lr": "use learning_rate=",
        "global_batch": "use batch_size=..., the samples of one worker",
        "max_epochs": "use epochs=",
        "num_workers": "DistributedTrainingOrchestrator(num_workers=...)",
        "devices": "DistributedTrainingOrchestrator(num_workers=...)",
        "gradient_clip_val": "use gradient_clip=",
        "max_steps": "use epochs=",
        "save_steps": "use checkpoint_every_steps=",
        "loss_fn": "train_distributed(model=",
        "epoch": "use epochs=",
    },
    ("PyTorchDDPTrainer", "DistributedConfig"): {
        "lr": "use learning_rate=",
        "max_epochs": "use epochs=",
        "global_batch": "batch_size counts the samples of one GPU",
        "devices": "use num_gpus=",
        "workers": "use num_gpus=",
        "accumulate_grad_batches": "use gradient_accumulation_steps=",
        "gradient_clip_val": "use gradient_clipping=",
        "precision": "use mixed_precision=True",
        "max_steps": "trainer.fit(train_loader, max_steps=...)",
        "output_dir": "use checkpoint_dir=",
        "log_every": "use log_every_n_steps=",
    },
    ("manager",): {
        "lr": "use learning_rate=",
        "max_epochs": "the loop is yours",
        "devices": "use world_size=",
        "accumulate_grad_batches": "use micro_batch_size=",
        "output_dir": "use checkpoint_dir=",
        "save_steps": "use save_interval=",
        "loss_fn": "prepare_training(",
        "leraning_rate": "did you mean learning_rate?",
    },
    ("LaunchConfig",): {
        "num_processes": "use nproc_per_node=",
        "devices": "use nproc_per_node=",
        "num_machines": "use nnodes=",
        "main_process_port": "use master_port=",
    },
}


@pytest.mark.parametrize(
    ("door", "name", "remedy"),
    [
        (door, name, remedy)
        for doors, answers in ANSWERS.items()
        for door in doors
        for name, remedy in answers.items()
    ],
)
def test_each_door_answers_names_of_other_libraries_with_its_own(door: str, name: str, remedy: str) -> None:
    given: dict[str, Any] = {name: 1}
    with pytest.raises(ConfigError, match=name) as caught:
        DOORS[door](**given)
    assert remedy in caught.value.remedy
    if "Trainer" in door or "Distributed" in door:
        assert "global_batch=" not in caught.value.remedy


def test_the_frames_of_a_refused_setting_are_the_users() -> None:
    with pytest.raises(ConfigError) as caught:
        paceline.TrainConfig(epochs=0)
    assert [str(entry.path) for entry in caught.traceback] == [__file__]


def test_master_addr_alone_says_to_unset_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(UsageError, match="MASTER_ADDR is set in the environment") as caught:
        trainer(settings(tmp_path / "run")).fit(data())
    assert "unset MASTER_ADDR" in caught.value.remedy
