"""What optimizers keep comes back from a checkpoint, or is refused by name."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.running import job, mlp, no_checkpoints, regression, train
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.core.errors import UsageError
from paceline.train.settings.train_config import CheckpointConfig
from paceline.train.state.optimizer_values import (
    from_plain,
    setting_from_plain,
    setting_to_plain,
    tensors_in,
    to_plain,
)

DATA = regression(29)


class Nested(Optimizer):
    """Keeps lists and dicts of tensors by parameter, and a counter and a mean as attributes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.turns = 0
        self.mean = torch.zeros(())
        self.seen: dict[str, Any] = {}
        self.helper = torch.sqrt

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.turns += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["past"] = [torch.zeros_like(parameter), {"slow": (torch.zeros_like(parameter), 0)}]
                slow, count = state["past"][1]["slow"]
                state["past"][0].mul_(0.9).add_(parameter.grad)
                state["past"][1]["slow"] = (slow.mul(0.5).add(state["past"][0]), count + 1)
                self.mean = 0.5 * self.mean + parameter.grad.abs().mean()
                self.seen["last"] = [self.turns, self.mean]
                rate = group["lr"] / (self.turns + self.seen["last"][1].item() + count)
                parameter.sub_(state["past"][1]["slow"][0], alpha=rate)


def test_nested_state_and_attributes_are_resumed(tmp_path: Path) -> None:
    def fit(folder: str, **given: Any) -> str:
        return train(job(mlp(), DATA, optimizer=Nested, run_dir=tmp_path / folder, **given)).hash

    whole = fit("whole", max_steps=5)
    part = fit("parts", max_steps=2)
    assert part != whole
    assert fit("parts", max_steps=5, resume="auto") == whole


class Global(SGD):
    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        state["global"] = {"turns": 1}
        super().step()


class Wrapper(SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1, momentum=0.9)
        self.inner = SGD(self.param_groups, 0.1)

    def step(self, closure: Any = None) -> Any:
        self.inner.step()


class Window(SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.past: deque[float] = deque()


class Odd(SGD):
    def step(self, closure: Any = None) -> Any:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = object()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: Global(p, 0.1), "Global keeps state under 'global', which is no parameter"),
        (Wrapper, "Wrapper.inner is an optimizer with a state of its own, SGD"),
        (Window, "Window.past is a deque: a checkpoint could not hold it"),
        (lambda p: Odd(p, 0.1), r"Odd, odd of 0\.weight is an object"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_the_first_save(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        train(job(mlp(), DATA, optimizer=make, run_dir=tmp_path / "run", epochs=1))
    history = train(job(mlp(), DATA, optimizer=make, checkpoint=no_checkpoints(), epochs=1)).history
    assert len(history.steps) == 3


def test_an_optimizer_that_changes_its_own_rate() -> None:
    class Decays(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            self.param_groups[0]["lr"] /= 2

    with pytest.raises(UsageError, match="that is not what the run's schedule wrote"):
        train(job(mlp(), DATA, optimizer=lambda p: Decays(p, 0.1), checkpoint=CheckpointConfig(), epochs=1))


def test_values_round_trip() -> None:
    value = {1: [torch.ones(2), (3, None)], "s": {"a", "b"}, "f": 2.5, "d": {"kind": "x", "value": []}}
    found = dict(tensors_in(value, "v"))
    again = from_plain(to_plain(value, "v", "it"), found.__getitem__)
    assert list(again) == list(value)
    assert again[1][0] is value[1][0]  # type: ignore[index]
    assert (again[1][1], again["s"], again["d"]) == ((3, None), {"a", "b"}, {"kind": "x", "value": []})
    for setting in ((0.9, 0.999), 1.0, None, {"a": 1}, frozenset({1, 2})):
        assert setting_from_plain(setting_to_plain(setting, "it"), setting) == setting
    rate = setting_from_plain(setting_to_plain(torch.tensor(0.5), "it"), torch.tensor(0.0))
    assert isinstance(rate, Tensor)
    assert rate == 0.5
