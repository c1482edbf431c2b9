"""The files of a new project, as `paceline init` writes them. The settings are written twice, as TOML with
remarks and as JSON: both say the same."""

from __future__ import annotations

import json
import tomllib
from typing import Final

_CONFIG: Final = """\
# Settings of the training. `paceline train train.py --set KEY=VALUE` wins over this file.
name = "{name}"         # runs are kept in runs/<time>-{name}
workers = 2             # processes that compute; the result does not depend on their number
shards = 4              # slices of each batch: the most workers that can share it; part of the result
global_batch = 64       # samples in one step, over all workers
epochs = 5              # passes over the data
seed = 0
clip_norm = 1.0         # the largest norm of a gradient
schedule = "cosine"     # of the learning rate: constant, linear or cosine
warmup_steps = 20

[checkpoint]
every_epochs = 1
keep_last = 3
keep_best = 1           # by the validation loss

[fault_tolerance]
min_workers = 1         # fewer than these left: stop with a verdict
"""

_TRAIN: Final = '''\
"""Train a model with Paceline: change `dataset`, `model` and the loss to your own. Settings: config.toml."""

from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.core import config

HERE = Path(__file__).parent


def dataset(samples: int, seed: int) -> torch.utils.data.Dataset:
    """Points on two spirals, and which of the two each is on. Any map-style dataset will do."""
    generator = torch.Generator().manual_seed(seed)
    side = torch.randint(0, 2, (samples,), generator=generator)
    turn = torch.rand(samples, generator=generator) * 6 + 1
    angle = turn + side * torch.pi
    points = torch.stack([turn * torch.cos(angle), turn * torch.sin(angle)], dim=1)
    points += 0.2 * torch.randn(samples, 2, generator=generator)
    return torch.utils.data.TensorDataset(points / 7, side)


def model() -> nn.Module:
    """Called on every worker: all begin with the same weights."""
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def main() -> None:
    trainer = paceline.Trainer(
        model,
        nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        config=config.load(paceline.TrainConfig, HERE / "config.toml"),
    )
    history = trainer.fit(dataset(2000, seed=1), dataset(500, seed=2))
    print(f"accuracy {history.best_accuracy:.3f}, state {history.state_hash[:16]}, {history.run_dir}")


if __name__ == "__main__":
    main()
'''

_README: Final = """\
# {name}

    paceline train train.py                 # as in config.toml
    paceline train train.py --workers 4     # the same weights, to the last bit
    paceline train train.py --chaos "kill rank=1 step=50"   # and after a failure
    paceline train train.py --resume auto   # continue what was stopped

    paceline monitor                        # watch the newest run
    paceline logs -f                        # what its workers say
    paceline ls                             # all runs
    paceline report                         # a page about the newest run

`train.py` has the model, the data and the loss; `config.toml` the settings. `config.json` has the same
settings for programs: `paceline train train.py --config config.json`.
"""


def project_files(name: str) -> dict[str, str]:
    """Return the text of each file of a project, by its name."""
    config = _CONFIG.format(name=name)
    return {
        "config.toml": config,
        "config.json": json.dumps(tomllib.loads(config), indent=2) + "\n",
        "train.py": _TRAIN,
        "README.md": _README.format(name=name),
        ".gitignore": "runs/\n__pycache__/\n",
    }
