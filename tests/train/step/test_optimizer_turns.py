"""Optimizers that take turns: only one of them steps, whichever rank computes, whenever a run continues."""

from __future__ import annotations

import dataclasses
import logging
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import job, seeded, train
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from paceline.core import config as core_config
from paceline.core.errors import ConfigError, UsageError
from paceline.train.callbacks import Modifier
from paceline.train.settings import conflicts
from paceline.train.settings.train_config import (
    CheckpointConfig,
    DynamicBatch,
    GradientCompression,
    LossScaling,
    TrainConfig,
    definition,
    to_toml,
)
from paceline.train.step.optimizer_turns import OptimizerTurns
from paceline.train.step_info import StepInfo

DATA = (torch.randn(29, 3, generator=torch.Generator().manual_seed(1)) * 0.5 + 1.0,)
WORKERS = (1, 2, 3, 4)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, noise: Tensor) -> Any:
        return self.critic(self.maker(noise))


def gan_loss(model: Any, batch: tuple[Tensor], step: StepInfo) -> Tensor:
    (real,) = batch
    # A function of the samples: ranks in threads share their generators, and autocast's cache of weights.
    noise = real[:, :2].sin()
    if step.optimizer == 1:
        return F.softplus(-model(noise)).float().mean()
    made, true = model.critic(torch.cat([model.maker(noise), real])).float().chunk(2)
    return F.softplus(made).mean() + F.softplus(-true).mean()


def critic_and_maker(parameters: Any) -> list[torch.optim.Optimizer]:
    named = parameters.named
    return [
        torch.optim.Adam([p for name, p in named.items() if name.startswith("critic")], 0.01),
        torch.optim.SGD([p for name, p in named.items() if name.startswith("maker")], 0.1, momentum=0.9),
    ]


def gan(**given: Any) -> Any:
    settings = {"optimizer_turns": (2, 1), "max_steps": 8, "objective": gan_loss, **given}
    return job(seeded(Gan), DATA, optimizer=critic_and_maker, **settings)


class Watches(Modifier):
    """Which parts of the model moved in each step, and which had a gradient."""

    def __init__(self) -> None:
        self.moved: list[set[str]] = []
        self.had: list[set[str]] = []
        self._before: dict[str, Tensor] = {}

    def change_gradients(self, parameters: Any) -> None:
        self.had.append({name.split(".")[0] for name, p in parameters.items() if p.grad is not None})
        self.look(parameters)

    def look(self, parameters: Any) -> None:
        now = {name: p.detach().clone() for name, p in parameters.items()}
        if self._before:
            moved = [name for name, p in now.items() if not torch.equal(p, self._before[name])]
            self.moved.append({name.split(".")[0] for name in moved})
        self._before = now


def test_only_the_optimizer_whose_turn_it_is_changes_its_parameters() -> None:
    watch = Watches()
    done = train(gan(callbacks=[watch]))
    watch.look(dict(done.module.named_parameters()))
    turns = [{"critic"}, {"critic"}, {"maker"}] * 3
    assert watch.moved == turns[:8]
    assert watch.had == turns[:8]
    assert done.history.steps[0].learning_rate == 0.01
    assert done.history.steps[2].learning_rate == 0.1


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"clip_norm": 0.1, "micro_batch": 1},
        {"precision": "fp16", "loss_scaling": LossScaling(initial=2.0**10, growth_interval=3)},
        {"compression": GradientCompression(kind="int8", error_feedback=False)},
    ],
)
def test_turns_have_the_same_bits_on_any_number_of_workers(given: Any) -> None:
    done = [train(gan(**given), workers) for workers in WORKERS]
    assert len({one.hash for one in done}) == 1
    assert len({tuple(one.losses) for one in done}) == 1


def test_an_optimizer_whose_parameters_begin_to_learn_later_rests_in_its_turns(tmp_path: Path) -> None:
    later = {"unfreeze": {"maker.": 4}, "optimizer_turns": (1, 1)}
    watch = Watches()
    done = train(gan(callbacks=[watch], **later))
    watch.look(dict(done.module.named_parameters()))
    assert watch.moved == [{"critic"}, set(), {"critic"}, set()] + [{"critic"}, {"maker"}] * 2
    assert len({train(gan(**later), workers).hash for workers in WORKERS} | {done.hash}) == 1
    saved = {"checkpoint": CheckpointConfig(every_steps=1), "run_dir": tmp_path / "run", **later}
    train(gan(**{**saved, "max_steps": 5}), 2)
    assert train(gan(**saved, resume="auto"), 3).hash == done.hash


def test_turns_equal_a_plain_loop() -> None:
    done = train(gan(shards=1, global_batch=29, drop_last=True, shuffle=False, clip_norm=0.05))
    model = seeded(Gan)
    made = critic_and_maker(type("P", (list,), {"named": dict(model.named_parameters())})(model.parameters()))
    for step in range(8):
        turn = (0, 0, 1)[step % 3]
        model.zero_grad()
        gan_loss(model, DATA, StepInfo(step=step, optimizer=turn)).backward()
        mine = [p for group in made[turn].param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(mine, 0.05)
        made[turn].step()
    for one, theirs in zip(model.parameters(), done.module.parameters(), strict=True):
        assert torch.allclose(one, theirs, atol=1e-6)


def test_a_run_that_resumes_within_a_turn_continues_it(tmp_path: Path) -> None:
    whole = train(gan(max_steps=11))
    saved = {"checkpoint": CheckpointConfig(every_steps=2), "run_dir": tmp_path / "run"}
    train(gan(max_steps=4, **saved), 2)
    rest = gan(max_steps=11, resume="auto", **saved)
    assert train(rest, 3).hash == whole.hash


def test_a_session_is_told_whose_turn_it_is(tmp_path: Path) -> None:
    model: Any = seeded(Gan)
    made: list[torch.optim.Optimizer] = [
        torch.optim.Adam(model.critic.parameters(), 0.01),
        torch.optim.SGD(model.maker.parameters(), 0.1, momentum=0.9),
    ]
    config = gan(run_dir=tmp_path / "run").config
    with paceline.session(model, made, dataclasses.replace(config, run_dir=str(tmp_path / "own"))) as run:
        for micro in run.microbatches(DATA):
            run.backward(gan_loss(model, micro.data, micro.info))
    assert paceline.state_hash(model) == train(gan()).hash


def test_turns_are_read_from_files_and_overrides() -> None:
    found = core_config.load(TrainConfig, {"optimizer_turns": [5, 1]}, overrides=["optimizer_turns=[2, 1]"])
    assert found.optimizer_turns == (2, 1)
    assert core_config.load(TrainConfig, tomllib.loads(to_toml(found))) == found


def test_other_turns_are_another_run(tmp_path: Path) -> None:
    saved = {"checkpoint": CheckpointConfig(every_steps=2), "run_dir": tmp_path / "run"}
    train(gan(max_steps=4, **saved))
    with pytest.raises(ConfigError, match=r"optimizer_turns: \[2, 1\] -> \[1, 1\]"):
        train(gan(max_steps=6, resume="auto", optimizer_turns=(1, 1), **saved))


def test_as_many_turns_as_optimizers() -> None:
    with pytest.raises(ConfigError, match="has 3 turns, and the run has 2 optimizers"):
        train(gan(optimizer_turns=(1, 1, 1)))
    with pytest.raises(ConfigError, match="a turn is one step or more"):
        TrainConfig(optimizer_turns=(1, 0))


def test_a_turn_whose_loss_reaches_no_parameter_of_its_optimizer_is_refused() -> None:
    def never(model: Any, batch: Any, step: StepInfo) -> Tensor:
        return (
            gan_loss(model, batch, dataclasses.replace(step, optimizer=0))
            if step.step < 2
            else (F.softplus(-model.critic(batch[0])).mean())
        )

    with pytest.raises(UsageError, match=r"step 3 is a turn of optimizer 1 \(SGD\)") as caught:
        train(gan(objective=never), 2)
    assert "step.optimizer" in caught.value.remedy


def test_parameters_that_rest_are_not_called_unused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(gan())
    assert "no gradient" not in caplog.text

    class Spare(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.maker.add_module("spare", nn.Identity())
            self.maker_spare = nn.Linear(1, 1)

    def both(parameters: Any) -> list[torch.optim.Optimizer]:
        named = parameters.named
        critic = [p for name, p in named.items() if name.startswith("critic")]
        maker = [p for name, p in named.items() if name.startswith("maker")]
        return [torch.optim.Adam(critic, 0.01), torch.optim.SGD(maker, 0.1)]

    given = job(seeded(Spare), DATA, optimizer=both, objective=gan_loss, optimizer_turns=(2, 1), max_steps=8)
    with caplog.at_level(logging.WARNING):
        train(given)
    assert caplog.text.count("no gradient to maker_spare.weight, maker_spare.bias") == 1
    assert "the first step of optimizer 1" in caplog.text


def test_what_does_not_go_with_turns_is_refused() -> None:
    feedback = TrainConfig(optimizer_turns=(1, 1), compression=GradientCompression(kind="int8"))
    with pytest.raises(ConfigError, match="would be sent, and lost"):
        conflicts.check(feedback, samples=100)
    dynamic = TrainConfig(optimizer_turns=(1, 1), shards=2, dynamic_batch=DynamicBatch(8, 32))
    with pytest.raises(ConfigError, match="different losses"):
        conflicts.check(dynamic, samples=100)


def test_turns_are_part_of_the_definition_as_plain_data() -> None:
    assert definition(TrainConfig(optimizer_turns=(5, 1)))["optimizer_turns"] == [5, 1]
    assert definition(TrainConfig())["optimizer_turns"] is None


def test_the_turn_follows_from_the_step_alone() -> None:
    one, other = (torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1) for _ in range(2))
    turns = OptimizerTurns([one, other], (2, 1))
    assert [turns.at(step) for step in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert [step for step in range(7) if turns.first_of_turn(step)] == [0, 2]
    together = OptimizerTurns([one, other], None)
    assert together.at(3) is None
    assert together.active(None) == [one, other]
    assert [step for step in range(4) if together.first_of_turn(step)] == [0]
