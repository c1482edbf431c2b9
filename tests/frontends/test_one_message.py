"""One error is one message: whichever door a user came in by, an error in their code is shown once, with
their frames and none of Paceline's."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train import small_run
from tests.train.small_run import UNATTENDED, build, data, settings
from torch import Tensor, nn

import paceline
from paceline.core.errors import ConfigError, UsageError
from paceline.frontends.own_words import translated


def broken(model: nn.Module, batch: Any) -> Tensor:
    raise KeyError("no such column")


def broken_loss(output: Tensor, target: Tensor) -> Tensor:
    return broken(nn.Identity(), (output, target))


def supervised(folder: Path) -> None:
    small_run.trainer(settings(folder), objective=broken).fit(data())


def spawned(folder: Path) -> None:
    small_run.trainer(settings(folder, fault_tolerance=UNATTENDED), objective=broken).fit(data())


def evaluated(folder: Path) -> None:
    small_run.trainer(settings(folder), objective=broken).evaluate(data())


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return broken(self, x)


def predicted(folder: Path) -> None:
    small_run.trainer(settings(folder, workers=1), model=Broken).predict(data()[0])


def per_gpu(folder: Path) -> None:
    trainer = paceline.PyTorchDDPTrainer(
        build(), num_gpus=1, batch_size=12, loss_fn=broken_loss, checkpoint_dir=folder
    )
    trainer.fit(torch.utils.data.TensorDataset(*data()))


def orchestrated(folder: Path) -> None:
    async def train() -> None:
        async with paceline.DistributedTrainingOrchestrator(num_workers=1) as orchestrator:
            await orchestrator.train_distributed(
                {"batch_size": 12, "run_dir": folder}, model=build, dataset=data(), objective=broken
            )

    asyncio.run(train())


def managed(folder: Path) -> None:
    with paceline.DistributedTrainingManager({"batch_size": 12}) as manager:
        manager.init_environment()
        manager.prepare_training(build(), 54, loss_fn=broken_loss)
        start, end = manager.get_local_batch(12)
        manager.train_step(tuple(part[start:end] for part in data()), 0)


DOORS = [supervised, spawned, evaluated, predicted, per_gpu, orchestrated, managed]


@pytest.mark.parametrize("door", DOORS, ids=[door.__name__ for door in DOORS])
def test_an_error_of_the_users_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], door: Callable[[Path], None]
) -> None:
    with pytest.raises((paceline.RankFailedError, KeyError)) as caught:
        door(tmp_path / "run")
    text = "".join(traceback.format_exception(caught.value))
    assert text.count('raise KeyError("no such column")') == 1
    assert "in broken" in text
    assert "/src/paceline/" not in text
    assert "direct cause" not in text
    said = capfd.readouterr().err
    assert "Traceback" not in said  # the supervisor has one line for each worker
    assert said.count("no such column") <= 1


def test_an_error_that_a_worker_finds_in_the_settings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopping = paceline.EarlyStopping(metric="acuracy")
    for care in (paceline.FaultTolerance(), UNATTENDED):
        folder = tmp_path / str(care.enabled)
        config = settings(folder, epochs=1, early_stopping=stopping, fault_tolerance=care)
        with pytest.raises(UsageError, match="'acuracy', and the evaluation has") as caught:
            small_run.trainer(config).fit(data(), data())
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("'acuracy'") == 1
        assert "/src/paceline/" not in text
        assert any("raised on rank" in note for note in caught.value.__notes__)
    assert "Traceback" not in capfd.readouterr().err


class FewSamples(nn.Module):
    """One sample is too few; `workers` and `global_batch` are the user's own words here."""

    def forward(self, x: Tensor) -> Tensor:
        workers = global_batch = len(x)
        assert workers > 1, global_batch
        return x


def test_what_a_worker_says_has_the_words_of_the_door_and_the_users_code_keeps_its_own(
    tmp_path: Path,
) -> None:
    dataset = torch.utils.data.TensorDataset(*(part[:25] for part in data()))
    trainer = paceline.PyTorchDDPTrainer(
        lambda: nn.Sequential(FewSamples(), nn.Linear(6, 3)), batch_size=12, checkpoint_dir=tmp_path / "run"
    )
    with pytest.raises(paceline.RankFailedError) as caught:
        trainer.fit(dataset)
    text = "".join(traceback.format_exception(caught.value))
    assert "assert workers > 1, global_batch" in text
    assert "where one sample is too few (BatchNorm), use another batch_size" in text
    assert "is saved: start again with resume_from_checkpoint=True" in text
    assert "drop_last" not in text


def test_settings_have_the_names_of_the_door_that_was_used(tmp_path: Path) -> None:
    dataset = torch.utils.data.TensorDataset(*data())
    with pytest.raises(UsageError, match="PyTorchDDPTrainer: scaler_init_scale=-1"):
        paceline.PyTorchDDPTrainer(build(), scaler_init_scale=-1.0)
    with pytest.raises(UsageError, match=r"^PyTorchDDPTrainer: num_gpus=0, which is less than 1"):
        paceline.PyTorchDDPTrainer(build(), num_gpus=0)
    with pytest.raises(UsageError, match="DistributedConfig: num_gpus=0, which is less than 1"):
        paceline.PyTorchDDPTrainer(build(), config={"num_gpus": 0})
    with pytest.raises(UsageError, match="PyTorchDDPTrainer: max_steps=0, which is less than 1"):
        paceline.PyTorchDDPTrainer(build(), checkpoint_dir=tmp_path).fit(dataset, max_steps=0)
    with pytest.raises(UsageError, match="batch_size=2 over shards=4: 2 of the 4 shards") as caught:
        paceline.DistributedTrainingManager({"batch_size": 2, "shards": 4})
    assert "set batch_size to 4 or more" in caught.value.remedy

    async def train() -> None:
        async with paceline.DistributedTrainingOrchestrator(num_workers=1) as orchestrator:
            await orchestrator.train_distributed(
                {"batch_size": 2, "shards": 4}, model=build, dataset=data(), objective=nn.CrossEntropyLoss()
            )

    with pytest.raises(UsageError, match=r"the global batch \(workers x batch_size\)=2 over shards=4"):
        asyncio.run(train())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("set workers to 2", "set num_gpus to 2"),
        ("coworkers and checkpoint.workers", "coworkers and checkpoint.workers"),
        ('a "b" of workers=3', 'a "c" of num_gpus=3'),
    ],
)
def test_words_are_replaced_as_a_whole(text: str, said: str) -> None:
    assert translated(text, {"workers": "num_gpus", '"b"': '"c"'}) == said


def test_a_callback_that_is_not_in_a_list() -> None:
    with pytest.raises(UsageError, match="callbacks is an EMA") as caught:
        small_run.trainer(paceline.TrainConfig(), callbacks=paceline.EMA())  # type: ignore[arg-type]
    assert "callbacks=[...]" in caught.value.remedy


def test_a_session_shows_the_lines_of_its_caller_alone(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = settings(tmp_path / "run", workers=1)
    with (
        pytest.raises(UsageError, match="trains a module, not a str") as no_module,
        paceline.session("net", optimizer),  # type: ignore[arg-type]
    ):
        pass

    def train() -> None:
        with paceline.session(model, optimizer, config) as run:
            for _ in run.microbatches((torch.randn(8, 4), torch.randn(8, 1))):
                run.backward(3.0)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match="the loss is a float") as no_loss:
        train()
    with pytest.raises(ConfigError, match="session has no setting 'batch_size'") as refused:
        paceline.session(model, optimizer, batch_size=4)  # type: ignore[call-arg]
    assert "TrainConfig(global_batch=...)" in refused.value.remedy
    for error in (no_module.value, no_loss.value, refused.value):
        assert "/src/paceline/" not in "".join(traceback.format_exception(error))


def test_a_manager_says_where_its_settings_belong() -> None:
    with pytest.raises(ConfigError, match="DistributedTrainingManager has no setting 'lr'") as caught:
        paceline.DistributedTrainingManager(lr=0.1)  # type: ignore[call-arg]
    assert '({"learning_rate": ...})' in caught.value.remedy
    assert "/src/paceline/" not in "".join(traceback.format_exception(caught.value))


def test_a_context_that_cannot_be_made_shows_the_lines_of_its_caller_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host")
    for make in (paceline.DistributedContext, lambda: paceline.DistributedContext(2, 5)):
        with pytest.raises(UsageError) as caught:
            make()
        assert "/src/paceline/" not in "".join(traceback.format_exception(caught.value))
