"""From Accelerate to Paceline: the loop stays, `accelerator.backward` becomes `run.backward`.

python examples/from_accelerate.py               with Paceline
python examples/from_accelerate.py --before      with Accelerate, where it is installed
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from image_files import digits


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def before(model: nn.Module, epochs: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = DataLoader(TensorDataset(*digits()[0]), batch_size=64, shuffle=True)
    prepared, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-2), loader
    )
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(prepared(images), labels))
            optimizer.step()


def after(model: nn.Module, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = paceline.TrainConfig(global_batch=64, epochs=epochs, progress=False)
    with paceline.session(model, optimizer, config) as run:
        for micro in run.microbatches(TensorDataset(*digits()[0])):  # of all epochs, in a seeded order
            run.backward(F.cross_entropy(model(micro.x), micro.y))  # zero_grad and step happen by themselves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", action="store_true", help="train with Accelerate")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = net()
    try:
        (before if options.before else after)(model, options.epochs)
    except ImportError as error:
        sys.exit(f"{error}: pip install accelerate")
    images, labels = digits()[1]
    with torch.no_grad():
        print(f"accuracy {float((model(images).argmax(1) == labels).float().mean()):.4f}")


if __name__ == "__main__":
    main()
