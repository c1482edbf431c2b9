"""`paceline.Trainer` with real workers: what travels to them and what comes back."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core.errors import ConfigError, UsageError
from paceline.frontends.spawn import spawn
from paceline.train.state.model_state import state_hash

X = torch.randn(29, 5, generator=torch.Generator().manual_seed(0))
Y = torch.sin(X[:, :2])


def config(tmp_path: Path, **given: Any) -> paceline.TrainConfig:
    defaults: dict[str, Any] = {
        "workers": 2,
        "shards": 4,
        "global_batch": 12,
        "epochs": 2,
        "threads": 1,
        "progress": False,
        "run_dir": tmp_path / "run",
    }
    return paceline.TrainConfig(**{**defaults, **given})


def linear(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))


def test_trained_weights_arrive_in_the_callers_module(tmp_path: Path) -> None:
    """Objects of functions, lambdas and local classes travel; the caller's generators are left alone."""

    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    model = Local()
    inside: Any = model.inner
    weight = inside[0].weight
    before = weight.clone()
    generators = (torch.get_rng_state(), random.getstate())
    trainer = paceline.Trainer(
        model,
        lambda m, batch: nn.functional.mse_loss(m(batch[0]), batch[1]),
        optimizer=lambda p: torch.optim.AdamW(p, 0.01),
        config=config(tmp_path),
    )
    history = trainer.fit((X, Y), (X[:7], Y[:7]))
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert inside[0].weight is weight
    assert not torch.equal(weight, before)
    assert state_hash(model) == history.state_hash
    assert int(inside[1].num_batches_tracked) == 6
    assert history.workers == 2
    assert len(history.epochs) == 2
    assert len(history.evaluations) == 2

    assert trainer.evaluate((X[:7], Y[:7])) == history.evaluations[-1].metrics
    model.eval()
    predicted = trainer.predict(X)
    with torch.no_grad():
        torch.testing.assert_close(predicted, model(X))
    assert (tmp_path / "run" / "config.toml").exists()
    assert (tmp_path / "run" / "journal.jsonl").exists()


def build() -> nn.Module:
    return nn.Linear(5, 2)


def test_a_function_that_builds_the_model(tmp_path: Path) -> None:
    generators = torch.get_rng_state()
    trainer = paceline.Trainer(
        build,
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=config(tmp_path, seed=3),
    )
    history = trainer.fit((X, Y))
    assert isinstance(trainer.model, nn.Linear)
    assert state_hash(trainer.model) == history.state_hash
    assert torch.equal(generators, torch.get_rng_state())


def joined(ctx: Any, folder: Path) -> tuple[str, str, str]:
    trainer = paceline.Trainer(
        build,
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=config(folder, workers=1, seed=3),
    )
    history = trainer.fit((X, Y))
    assert isinstance(trainer.model, nn.Module)
    loss = trainer.evaluate((X, Y))["loss"]
    return history.state_hash, state_hash(trainer.model), repr(loss)


def test_inside_a_job_it_joins(tmp_path: Path) -> None:
    found = spawn(joined, tmp_path / "many", workers=3, threads=1, timeout=60)
    assert len(set(found)) == 1
    assert found[0][0] == found[0][1], "the built module holds the trained weights on every rank"
    alone = paceline.Trainer(
        build,
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=config(tmp_path / "one", workers=1, seed=3),
    )
    assert alone.fit((X, Y)).state_hash == found[0][0]


def test_a_run_keeps_its_shards_when_it_goes_on_with_other_workers(tmp_path: Path) -> None:
    """They are chosen for the first start where the caller did not choose them."""

    def part(folder: str, workers: int, **given: Any) -> str:
        trainer = paceline.Trainer(
            linear(),
            nn.MSELoss(),
            optimizer=lambda p: torch.optim.AdamW(p, 0.01),
            config=config(
                tmp_path / folder, workers=workers, shards=None, threads=None, epochs=None, **given
            ),
        )
        history = trainer.fit((X, Y))
        assert history.shards == 4
        return history.state_hash

    part("stopped", 2, max_steps=2)
    assert part("stopped", 1, max_steps=4, resume="auto") == part("whole", 2, max_steps=4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.slow
def test_compiled_models_train(tmp_path: Path) -> None:
    model = nn.Linear(5, 2)
    trainer = paceline.Trainer(
        model,
        nn.MSELoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        config=config(tmp_path, compile=True, drop_last=True, workers=1),
    )
    history = trainer.fit((X, Y))
    assert history.steps[-1].loss < history.steps[0].loss
    assert state_hash(model) == history.state_hash
    assert set(model.state_dict()) == {"weight", "bias"}
    assert trainer.evaluate((X, Y))["loss"] < history.steps[0].loss
    torch.testing.assert_close(trainer.predict(X), model(X).detach())


SCRIPT = """
import sys, torch, paceline
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2)
    def forward(self, x):
        return self.layer(x)

class Count(paceline.Observer):
    steps = 0
    def on_step(self, record):
        Count.steps += 1
    def on_end(self, history):
        print("steps", Count.steps, flush=True)

torch.manual_seed(0)
x = torch.randn(20, 5)
scale = 2.0
objective = lambda model, batch: ((model(batch) * scale) ** 2).mean()
model = Mine()
config = paceline.TrainConfig(workers=2, global_batch=4, threads=1, run_dir=sys.argv[1])
trainer = paceline.Trainer(model, objective, optimizer=lambda p: torch.optim.SGD(p, 0.05), config=config,
                           callbacks=[Count()])
history = trainer.fit(x)
print("losses", history.steps[0].loss > history.steps[-1].loss, history.epochs[0].samples)
"""


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """As in a notebook: everything is an object of __main__."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "losses True 20"
    assert "steps 5" in done.stdout


# refused before a worker starts


def test_bad_arguments_are_refused_at_once(tmp_path: Path) -> None:
    def trainer(**changed: Any) -> paceline.Trainer:
        given: dict[str, Any] = {
            "model": build,
            "objective": nn.MSELoss(),
            "optimizer": lambda p: torch.optim.SGD(p, 0.1),
            "config": config(tmp_path),
        }
        given |= changed
        return paceline.Trainer(given.pop("model"), given.pop("objective"), **given)

    with pytest.raises(UsageError, match="the model is a str"):
        trainer(model="resnet")
    with pytest.raises(UsageError, match="neither an Observer nor a Modifier"):
        trainer(callbacks=[print])
    with pytest.raises(UsageError, match="the objective is a str"):
        trainer(objective="mse").fit((X, Y))
    with pytest.raises(UsageError, match=r"cannot be called with \(model, batch\)"):
        trainer(objective=lambda model: 0).fit((X, Y))
    with pytest.raises(ConfigError, match="global_batch=2 over shards=4"):
        trainer(config=config(tmp_path, global_batch=2)).fit((X, Y))
    assert not (tmp_path / "run").exists()
