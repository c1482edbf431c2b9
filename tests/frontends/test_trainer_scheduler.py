"""`scheduler=` of a Trainer and of a session: real workers that are killed, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.frontends.session_parts import X, Y, build, config
from tests.train import small_run
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import paceline
from paceline.core.errors import ConfigError, UsageError
from paceline.frontends.recomputation import verify_fit
from paceline.testing.gauntlet.models import cosine_and_plateau, two_optimizers
from paceline.train.history import History


def fit(folder: Path, workers: int, **changes: Any) -> History:
    trainer = paceline.Trainer(
        small_run.build,
        nn.CrossEntropyLoss(),
        optimizer=two_optimizers,
        scheduler=cosine_and_plateau,
        config=small_run.settings(folder, workers, **changes),
    )
    return trainer.fit(small_run.data(), small_run.data())


def test_kills_around_the_end_of_an_epoch_and_a_resume_on_other_workers_leave_no_trace(
    tmp_path: Path,
) -> None:
    quiet = fit(tmp_path / "quiet", 1, fault_tolerance=small_run.UNATTENDED)
    rates = [record.learning_rate for record in quiet.steps]
    assert len(set(rates)) > 3
    # Of an epoch's end: its last step, its evaluation, the save that follows; and the first step after it.
    faults = "kill rank=1 step=5 phase=evaluation; kill rank=0 step=10 phase=checkpoint; "
    faults += "kill rank=2 step=15 phase=collective; kill rank=1 step=16 phase=forward"
    care = paceline.FaultTolerance(chaos=faults, max_worker_failures=10)
    killed = fit(tmp_path / "killed", 3, epochs=4, fault_tolerance=care)
    assert len([e for e in small_run.journal_of(tmp_path / "killed") if e.type == "fault_injected"]) == 4
    assert [record.learning_rate for record in killed.steps] == rates[:20]
    resumed = fit(tmp_path / "killed", 2, resume="auto")
    assert resumed.state_hash == quiet.state_hash
    assert [record.learning_rate for record in resumed.steps] == rates[-len(resumed.steps) :]


def test_a_run_is_computed_again_with_the_evaluations_that_its_scheduler_followed(tmp_path: Path) -> None:
    def trainer(scheduler: Any, folder: Path, **given: Any) -> paceline.Trainer:
        return paceline.Trainer(
            small_run.build,
            nn.CrossEntropyLoss(),
            optimizer=small_run.adam,
            scheduler=scheduler,
            config=small_run.settings(
                folder, 1, epochs=3, audit_every=5, fault_tolerance=small_run.UNATTENDED, **given
            ),
        )

    def plateau(optimizer: Any) -> lr_scheduler.LRScheduler:
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

    def cycle(optimizer: Any, total_steps: int) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps)

    by_step = {"scheduler_interval": "step"}
    cases: list[tuple[Any, dict[str, Any]]] = [
        (plateau, {}),
        (plateau, {**by_step, "evaluate_every": 4}),
        (cycle, by_step),
    ]
    for number, (scheduler, given) in enumerate(cases):
        folder = tmp_path / str(number)
        history = trainer(scheduler, folder, **given).fit(small_run.data(), small_run.data())
        assert len({record.learning_rate for record in history.steps}) > 1
        # As it was before the run: after it the model is the trained one.
        again = trainer(scheduler, folder, **given)
        assert verify_fit(again, folder, None, small_run.data()).same


def own_loop(folder: Path, scheduler: Any, **given: Any) -> tuple[nn.Module, History]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    made = scheduler(optimizer) if given.pop("built", False) else scheduler
    settings = config(run_dir=folder, **given)
    with paceline.session(model, optimizer, settings, scheduler=made) as run:
        for micro in run.microbatches((X, Y)):
            run.backward(F.mse_loss(model(micro.x), micro.y))
    assert run.history is not None
    return model, run.history


def test_a_session_steps_it_as_the_trainer_does(tmp_path: Path) -> None:
    def cycle(optimizer: Any) -> lr_scheduler.LRScheduler:
        return lr_scheduler.OneCycleLR(optimizer, 0.05, 6)

    by_function = own_loop(tmp_path / "function", cycle, scheduler_interval="step")[1]
    built = own_loop(tmp_path / "built", cycle, scheduler_interval="step", built=True)[1]
    trainer = paceline.Trainer(
        build(),
        nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.01),
        scheduler=cycle,
        config=config(
            run_dir=tmp_path / "trainer", scheduler_interval="step", fault_tolerance=small_run.UNATTENDED
        ),
    )
    usual = trainer.fit((X, Y))
    assert by_function.state_hash == built.state_hash == usual.state_hash
    assert len({record.learning_rate for record in usual.steps}) == 6
    with pytest.raises(ConfigError, match="there is no validation data"):
        own_loop(tmp_path / "plateau", lr_scheduler.ReduceLROnPlateau, built=True)
    with pytest.raises(UsageError, match="the scheduler is the class StepLR"):
        own_loop(tmp_path / "class", lr_scheduler.StepLR)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_a_scheduler_that_the_loop_steps_as_well_is_named(tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    steps = lr_scheduler.StepLR(optimizer, 1, 0.5)

    def loop() -> None:
        with paceline.session(model, optimizer, config(run_dir=tmp_path / "run"), scheduler=steps) as run:
            for micro in run.microbatches((X, Y)):
                run.backward(F.mse_loss(model(micro.x), micro.y))
                steps.step()

    with pytest.raises(UsageError, match="the learning rate of group 0") as refused:
        loop()
    assert "leave scheduler.step()" in refused.value.remedy


def test_what_is_no_function_of_the_optimizer_is_refused_with_the_remedy() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    built = lr_scheduler.StepLR(optimizer, 3)

    def refusal(error: type[Exception], make: Any) -> str:
        with pytest.raises(error) as refused:
            make()
        return f"{refused.value} {getattr(refused.value, 'remedy', '')}"

    def trainer(scheduler: Any) -> Any:
        return lambda: paceline.Trainer(
            nn.Linear(1, 1), nn.MSELoss(), optimizer=torch.optim.SGD, scheduler=scheduler
        )

    builds = "scheduler=lambda optimizer: StepLR(optimizer, ...)"
    assert builds in refusal(UsageError, trainer(lr_scheduler.StepLR))
    assert "a StepLR that is built" in refusal(UsageError, trainer(built))
    assert builds in refusal(UsageError, trainer([built]))
    assert "the scheduler is a str" in refusal(UsageError, trainer("cosine"))
    stream = paceline.Trainer(
        nn.Linear(1, 1),
        nn.MSELoss(),
        optimizer=torch.optim.SGD,
        scheduler=lambda optimizer, total_steps: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps),
    )
    unknown = refusal(ConfigError, lambda: stream.fit(lambda: iter([]), None))
    assert "asks for total_steps, and that is not known" in unknown
    assert "asks for steps, which a run does not know" in refusal(
        ConfigError, trainer(lambda optimizer, steps: None)
    )
    # In the place of a schedule.
    for given in (lr_scheduler.StepLR, built):
        text = refusal(ConfigError, lambda given=given: paceline.TrainConfig(schedule=given))
        assert f"paceline.Trainer(..., {builds})" in text
    text = refusal(ConfigError, lambda: paceline.TrainConfig(scheduler=lr_scheduler.StepLR))  # type: ignore[call-arg]
    assert "paceline.Trainer(scheduler=...)" in text
