"""`PyTorchDDPTrainer`: every argument means what its users mean, and the bits are those of `Trainer`."""

from __future__ import annotations

import inspect
import logging
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tests.frontends.watched import debugged
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import paceline
from paceline.core.errors import ConfigError, UsageError
from paceline.frontends import announcements, overrides
from paceline.frontends.overrides import Overrides
from paceline.train.state.model_state import state_hash

SAMPLES = 50
QUIET = {"threads": 1, "progress": False, "device": "cpu", "seed": 3}


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    announcements.forget()
    with overrides.in_force(Overrides(options=QUIET)):
        yield


def trained(folder: Path, train: Any = None, /, *, max_steps: int | None = None, **given: Any) -> Any:
    """Train in this process; return the trainer."""
    trainer = paceline.PyTorchDDPTrainer(build, checkpoint_dir=folder, **given)
    with debugged():
        trainer.fit(data() if train is None else train, data(), max_steps=max_steps)
    return trainer


def recorded(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "config.toml").read_text())


def test_the_signature() -> None:
    parameters = dict(inspect.signature(paceline.PyTorchDDPTrainer).parameters)
    model = parameters.pop("model")
    assert model.default is inspect.Parameter.empty
    defaults = {name: one.default for name, one in parameters.items()}
    assert defaults == {
        "num_gpus": None,
        "batch_size": 32,
        "epochs": 1,
        "learning_rate": 1e-3,
        "mixed_precision": False,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": None,
        "scaler_init_scale": 2**16,
        "scaler_growth_interval": 2000,
        "checkpoint_frequency": None,
        "checkpoint_dir": None,
        "resume_from_checkpoint": False,
        "tensorboard_dir": None,
        "tensorboard": False,
        "mlflow_tracking": False,
        "log_every_n_steps": 50,
        "find_unused_parameters": False,
        "communication_backend": None,
        "optimizer": None,
        "loss_fn": None,
        "scheduler": None,
        "config": None,
        "callbacks": (),
    }
    assert [*inspect.signature(paceline.PyTorchDDPTrainer.fit).parameters] == [
        "self",
        "train_loader",
        "val_loader",
        "checkpoint_dir",
        "mlflow_experiment",
        "max_steps",
        "profile",
    ]


def test_a_model_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = build()
    trainer = paceline.PyTorchDDPTrainer(module)
    assert trainer.effective_batch == 32 * max(1, torch.cuda.device_count())
    nothing: Any = trainer.best_accuracy
    assert nothing is None
    with debugged():
        history = trainer.fit(data(), data(), checkpoint_dir=tmp_path / "run")
    assert trainer.model is module
    assert state_hash(module) == history.state_hash
    assert history.best_accuracy == trainer.best_accuracy
    assert trainer.best_accuracy is not None
    assert history.total_time > 0
    said = capsys.readouterr().err
    assert "paceline: no loss_fn: the loss is cross-entropy, because the targets are whole numbers\n" in said
    assert "paceline: no optimizer: AdamW with learning_rate 0.001, which is not scaled with" in said
    if not torch.cuda.is_available():
        assert "paceline: no GPU here: num_gpus counts CPU workers, and there is 1\n" in said
    assert trainer.evaluate(data())["accuracy"] == history.evaluations[-1].metrics["accuracy"]


def test_the_arithmetic_is_said_once_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = {"num_gpus": 1, "batch_size": 4, "gradient_accumulation_steps": 3}
    loader = DataLoader(data(), batch_size=16)
    trainer = trained(tmp_path / "a", loader, max_steps=2, communication_backend="gloo", **sizes)
    assert trainer.effective_batch == 12
    arithmetic = "global batch 12 = batch_size 4 x gradient_accumulation_steps 3 x num_gpus 1"
    said = capsys.readouterr().err
    assert said.count(arithmetic) == 1
    assert "the DataLoader's batch_size 16 is not used: the trainer's is 4" in said
    assert "communication_backend gloo: gradients are summed in one fixed order" in said
    assert recorded(tmp_path / "a")["global_batch"] == 12
    trained(tmp_path / "b", max_steps=2, **sizes)
    assert arithmetic not in capsys.readouterr().err
    announcements.forget()
    with caplog.at_level(logging.INFO, "paceline"):
        trained(tmp_path / "c", max_steps=2, **sizes)
    assert arithmetic in caplog.messages, "where the program shows such lines, they are of the log"
    assert arithmetic not in capsys.readouterr().err


class Sizes(nn.Module):
    """Remembers the samples of each forward pass in training."""

    seen: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            Sizes.seen.append(len(x))
        return self.inner(x)


def test_a_forward_pass_has_batch_size_samples(tmp_path: Path) -> None:
    Sizes.seen.clear()
    trainer = paceline.PyTorchDDPTrainer(Sizes(), 1, 5, gradient_accumulation_steps=2)
    with debugged():
        history = trainer.fit(data(), checkpoint_dir=tmp_path / "run")
    assert Sizes.seen == [5] * 10
    assert [record.samples for record in history.steps] == [10] * 5


@pytest.mark.parametrize("sampler", [DistributedSampler, paceline.DistributedSampler])
def test_a_loader_with_a_distributed_sampler_is_its_dataset(tmp_path: Path, sampler: Any) -> None:
    """The sampler of rank 1 of 4 has a quarter of the samples; the run has every sample once."""
    whole = data()
    loader = DataLoader(whole, batch_size=8, sampler=sampler(whole, num_replicas=4, rank=1))
    one = trained(tmp_path / "sampler", loader, batch_size=8, epochs=2)
    assert [epoch.samples for epoch in one.history.epochs] == [SAMPLES, SAMPLES]
    plain = trained(tmp_path / "plain", whole, batch_size=8, epochs=2)
    assert one.history.state_hash == plain.history.state_hash


def test_settings_arrive(tmp_path: Path) -> None:
    trained(
        tmp_path / "run",
        max_steps=3,
        batch_size=8,
        epochs=4,
        mixed_precision=True,
        scaler_init_scale=128,
        scaler_growth_interval=5,
        gradient_clipping=0.5,
        checkpoint_frequency=3,
        log_every_n_steps=2,
    )
    config = recorded(tmp_path / "run")
    assert config["precision"] == "fp16"
    assert config["loss_scaling"]["initial"] == 128.0
    assert config["loss_scaling"]["growth_interval"] == 5
    assert (config["clip_norm"], config["log_every"]) == (0.5, 2)
    assert (config["epochs"], config["max_steps"]) == (4, 3)
    assert config["checkpoint"]["every_epochs"] == 3


def test_checkpoints_count_epochs_and_a_run_resumes_or_begins(tmp_path: Path) -> None:
    given: dict[str, Any] = {"batch_size": 10, "optimizer": sgd, "checkpoint_frequency": 2}
    whole = trained(tmp_path / "whole", epochs=4, **given)
    first = trained(tmp_path / "parts", epochs=2, resume_from_checkpoint=True, **given)
    assert len(first.history.epochs) == 2, "there was nothing to resume"
    with pytest.raises(UsageError, match="already holds a run") as info:
        trained(tmp_path / "parts", epochs=4, **given)
    assert "resume_from_checkpoint=True" in info.value.remedy
    second = trained(tmp_path / "parts", epochs=4, resume_from_checkpoint=True, **given)
    assert second.history.state_hash == whole.history.state_hash
    assert [record.step for record in second.history.steps] == [*range(1, 21)]


def test_a_run_resumes_with_other_gpus_where_the_step_is_the_same(tmp_path: Path) -> None:
    def part(gpus: int, steps: int, epochs: int, **given: Any) -> Any:
        return trained(
            tmp_path / "run",
            num_gpus=gpus,
            gradient_accumulation_steps=steps,
            batch_size=10,
            epochs=epochs,
            optimizer=sgd,
            scheduler=warmup_then_cosine,
            resume_from_checkpoint=True,
            **given,
        )

    part(1, 2, 2)
    with pytest.raises(ConfigError, match="num_gpus x gradient_accumulation_steps: 2 -> 4") as info:
        part(1, 4, 4)
    assert "num_gpus may change where num_gpus x gradient_accumulation_steps stays" in info.value.remedy
    with pytest.raises(ConfigError, match="mixed_precision: False -> True"):
        part(1, 2, 4, mixed_precision=True)
    whole = trained(
        tmp_path / "whole",
        gradient_accumulation_steps=2,
        batch_size=10,
        epochs=4,
        optimizer=sgd,
        scheduler=warmup_then_cosine,
    )
    assert part(2, 1, 4).history.state_hash == whole.history.state_hash


def test_one_hot_rows_of_whole_numbers_are_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = data().tensors
    rows = TensorDataset(x, nn.functional.one_hot(y))
    trainer = paceline.PyTorchDDPTrainer(build, checkpoint_dir=tmp_path / "run", epochs=2)
    with debugged():
        history = trainer.fit(rows, rows)
    classes = paceline.PyTorchDDPTrainer(build, checkpoint_dir=tmp_path / "classes", epochs=2)
    with debugged():
        assert classes.fit(data(), data()).best_accuracy == history.best_accuracy
    assert "the loss is cross-entropy, because the targets are one-hot rows" in capsys.readouterr().err


def test_an_argument_wins_over_the_config(tmp_path: Path) -> None:
    config = paceline.DistributedConfig(num_gpus=2, batch_size=16, epochs=3, learning_rate=0.5)
    trainer = paceline.PyTorchDDPTrainer(build, config=config, batch_size=4)
    assert trainer.effective_batch == 8
    assert (trainer.config.epochs, trainer.config.learning_rate) == (3, 0.5)
    file = config.save(tmp_path / "run.yaml")
    assert paceline.PyTorchDDPTrainer(build, config=file).config == config
    assert paceline.PyTorchDDPTrainer(build, config={"epochs": 7}).config.epochs == 7
    with pytest.raises(ConfigError, match="num_nodes=2 x gpus_per_node=3 = 6, not 8"):
        paceline.PyTorchDDPTrainer(
            build, num_gpus=8, config=paceline.DistributedConfig(num_nodes=2, gpus_per_node=3)
        )


@pytest.mark.parametrize(
    ("given", "said", "remedy"),
    [
        ({"lr": 0.1}, "PyTorchDDPTrainer has no setting 'lr'", "use learning_rate="),
        ({"workers": 4}, "has no setting 'workers'", "use num_gpus="),
        ({"resume_from_checkpoint": "folder"}, "resume_from_checkpoint is a str", "checkpoint_dir="),
        ({"config": 3}, "config is an int", "DistributedConfig"),
        ({"num_gpus": 0}, "num_gpus=0", ""),
        ({"communication_backend": "rdma"}, "communication_backend", ""),
    ],
)
def test_refusals(given: dict[str, Any], said: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=said) as info:
        paceline.PyTorchDDPTrainer(build, **given)
    assert remedy in info.value.remedy


def test_what_comes_too_early_or_needs_a_launcher() -> None:
    with pytest.raises(UsageError, match="evaluate before fit"):
        paceline.PyTorchDDPTrainer(build).evaluate(data())
    config = paceline.DistributedConfig(num_nodes=2, gpus_per_node=1)
    with pytest.raises(UsageError, match="num_nodes=2, and this process is no rank of a job") as info:
        paceline.PyTorchDDPTrainer(build, config=config).fit(data())
    assert "--nnodes 2" in info.value.remedy
    with pytest.raises(ConfigError, match="only fp16 has so small a range") as info:
        paceline.PyTorchDDPTrainer(build, scaler_init_scale=8.0).fit(data())
    assert info.value.remedy == (
        "leave scaler_init_scale and scaler_growth_interval out, or set mixed_precision=True"
    )
    with pytest.raises(UsageError, match="the model is a str"):
        paceline.PyTorchDDPTrainer("resnet")  # type: ignore[arg-type]


def test_a_learning_rate_beside_an_optimizer_is_said_to_be_unused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "run", max_steps=1, optimizer=sgd, learning_rate=0.5)
    said = capsys.readouterr().err
    assert "learning_rate 0.5 is not used: optimizer= makes an optimizer with its own" in said


def warmup_then_cosine(optimizer: Any) -> Any:
    warmup, cosine = LinearLR(optimizer, 0.5, total_iters=2), CosineAnnealingLR(optimizer, 3)
    return SequentialLR(optimizer, [warmup, cosine], milestones=[2])


def test_a_scheduler_steps_once_an_epoch(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run", batch_size=25, epochs=5, optimizer=sgd, scheduler=warmup_then_cosine)
    rates = [record.learning_rate for record in trainer.history.steps]
    assert rates[::2] == rates[1::2], "two steps of an epoch have one rate"
    assert rates[::2] == pytest.approx([0.05, 0.075, 0.1, 0.075, 0.025])


def test_a_plateau_is_one_of_the_validation_metric(tmp_path: Path) -> None:
    """The loss of a model that does not learn stays; the training loss, with dropout, would not."""
    trainer = trained(
        tmp_path / "run",
        batch_size=50,
        epochs=4,
        optimizer=lambda p: torch.optim.SGD(p, 1e-30),
        scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
    )
    rates = [record.learning_rate for record in trainer.history.steps]
    assert rates == pytest.approx([1e-30, 1e-30, 5e-31, 2.5e-31], rel=1e-6)


def in_a_job(ctx: Any, folder: Path) -> tuple[int, str, int]:
    trainer = paceline.PyTorchDDPTrainer(build, batch_size=4, optimizer=sgd)
    with overrides.in_force(Overrides(options=QUIET)):
        history = trainer.fit(data(), data(), checkpoint_dir=folder, max_steps=4)
    return trainer.effective_batch, history.state_hash, history.workers


def test_in_a_job_its_ranks_are_the_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = paceline.spawn(in_a_job, tmp_path / "job", workers=2, threads=1, timeout=60)
    said = capfd.readouterr()
    assert (said.err + said.out).count("global batch 8 = ") == 1, "the first rank speaks for all"
    alone = paceline.PyTorchDDPTrainer(build, 1, 4, gradient_accumulation_steps=2, optimizer=sgd)
    with debugged():
        history = alone.fit(data(), data(), checkpoint_dir=tmp_path / "alone", max_steps=4)
    assert found == [(8, history.state_hash, 2)] * 2
    assert alone.config.checkpoint_dir is None, "a place for one fit is not one for the next"


def test_gpus_and_accumulation_steps_make_the_same_bits(tmp_path: Path) -> None:
    """12 forward passes a step, on 1 to 4 workers; one is killed, and one run goes on with another number."""

    def hash_of(name: str, gpus: int, more: dict[str, Any], max_steps: int | None = None) -> str:
        options = {**QUIET, **more}
        trainer = paceline.PyTorchDDPTrainer(
            build,
            gpus,
            batch_size=2,
            epochs=3,
            gradient_accumulation_steps=12 // gpus,
            optimizer=sgd,
            scheduler=warmup_then_cosine,
            checkpoint_dir=tmp_path / name,
            resume_from_checkpoint=True,
        )
        with overrides.in_force(Overrides(options=options)):
            return trainer.fit(data(), data(), max_steps=max_steps).state_hash

    with debugged():
        expected = hash_of("one", 1, {})
    killed = hash_of("two", 2, {"fault_tolerance.chaos": "kill rank=1 step=4"})
    assert killed == expected
    alone = {"fault_tolerance.enabled": False}
    assert hash_of("three", 3, alone) == expected
    hash_of("four", 4, alone, max_steps=5)
    with debugged():
        assert hash_of("four", 1, {}) == expected
