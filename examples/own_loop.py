"""A loop of your own with the guarantees of the Trainer: you write forward and loss, Paceline hands out
micro-batches, adds gradients, steps and saves.

    python examples/own_loop.py [--workers 2]
    mpirun -np 4 python examples/own_loop.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from image_files import digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if paceline.get_distributed_info()["world_size"] > 1:  # a launcher has started the ranks
        train(paceline.init_process_group())
    else:
        paceline.spawn(train, workers=options.workers)


def train(context: paceline.DistributedContext) -> None:
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    config = paceline.TrainConfig(global_batch=64, epochs=8, progress=False)
    with paceline.session(model, optimizer, config) as run:
        for micro in run.microbatches((x, y)):
            output = model(micro.x)
            right = (output.argmax(1) == micro.y).float().mean()
            run.backward(F.cross_entropy(output, micro.y), {"right": right})
    if context.is_master:
        with torch.no_grad():
            accuracy = float((model(test_x).argmax(1) == test_y).float().mean())
        print(f"accuracy {accuracy:.4f}, weights {paceline.state_hash(model)[:16]}")


if __name__ == "__main__":
    main()
