"""Search for the learning rate, the width and the optimizer of a small network, several trials at once.

    python examples/tune_digits.py --trials 16
    python examples/tune_digits.py --trials 16 --resume      after Ctrl-C or kill -9: goes on where it was
    python examples/tune_digits.py --trials 24 --population  population-based training, from checkpoints

Needs `pip install 'paceline[tune]' scikit-learn`.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

import torch
from torch import nn

import paceline

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
EPOCHS = 8


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits  # takes seconds, and trials do not need it

    found = load_digits()
    return torch.tensor(found.data, dtype=torch.float32) / 16.0, torch.tensor(found.target)


def train(params: dict[str, Any], inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Train a network with these parameters and return its accuracy on the last 400 digits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, params["width"]), nn.ReLU(), nn.Linear(params["width"], 10))
    optimizer = OPTIMIZERS[params["optimizer"]](model.parameters(), lr=params["lr"])
    if (before := paceline.tune.parent_folder()) is not None:
        model.load_state_dict(torch.load(before / "model.pt", weights_only=True))
    accuracy = 0.0
    for epoch in range(EPOCHS):
        for batch in torch.randperm(1200).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(inputs[-400:]).argmax(dim=1) == labels[-400:]).float().mean().item()
        paceline.tune.report(epoch, accuracy)  # a pruned trial ends here
    torch.save(model.state_dict(), paceline.tune.folder() / "model.pt")
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--parallel", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--population", action="store_true")
    given = parser.parse_args()
    space = {
        "lr": paceline.tune.loguniform(1e-3, 1.0),
        # The checkpoints of a population must fit each other.
        "width": [64] if given.population else [16, 64, 128],
        "optimizer": ["sgd", "adam"],
    }
    inputs, labels = digits()
    tuner = paceline.DistributedTuner(
        functools.partial(train, inputs=inputs, labels=labels),  # read once, shared by all trials
        space,
        num_gpus=given.parallel,
        sampler=paceline.tune.PopulationTraining(size=6) if given.population else "tpe",
        pruner=None if given.population else "median",
        study="digits-population" if given.population else "digits",
        seed=1,
    )
    best = tuner.tune(given.trials, resume=given.resume)
    print(tuner.table())
    print(f"{len(tuner.trials)} trials, accuracy {tuner.best_value:.3f} with {best}")


if __name__ == "__main__":
    main()
