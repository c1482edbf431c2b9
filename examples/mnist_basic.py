"""Handwritten digits, the basic way: a model, a loss, an optimizer, data.

    python examples/mnist_basic.py                                          scikit-learn's digits
    python examples/mnist_basic.py train-images-idx3-ubyte t10k-images-idx3-ubyte    MNIST
    mpirun -np 4 python examples/mnist_basic.py
    paceline run --nproc-per-node 4 examples/mnist_basic.py

`--workers` is how many processes train; the result does not depend on it. `--plain` trains the same in a loop
of torch alone, for comparison.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import paceline
from image_files import Images, digits, mnist


def net(side: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(32 * (side // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(options: argparse.Namespace, train_set: Images, test_set: Images) -> float:
    side = train_set[0].shape[-1]
    trainer = paceline.Trainer(
        lambda: net(side),
        nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adadelta(p, lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
        config=paceline.TrainConfig(workers=options.workers, global_batch=64, epochs=options.epochs, seed=1),
    )
    history = trainer.fit(train_set, test_set)
    print(f"weights {history.state_hash[:16]}, saved in {history.run_dir}")
    return history.evaluations[-1].metrics["accuracy"]


def train_plainly(options: argparse.Namespace, train_set: Images, test_set: Images) -> float:
    torch.manual_seed(1)
    model = net(train_set[0].shape[-1])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    for _ in range(options.epochs):
        model.train()
        for rows in torch.randperm(len(train_set[1])).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_set[0][rows]), train_set[1][rows]).backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        return float((model(test_set[0]).argmax(1) == test_set[1]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", nargs="?", help="file of images, with the labels beside it")
    parser.add_argument("test", nargs="?")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="6 of scikit-learn's digits, 1 of MNIST's 60,000 images")
    parser.add_argument("--plain", action="store_true", help="train in a loop of torch alone")
    options = parser.parse_args()
    if (options.train is None) != (options.test is None):
        parser.error("give a file to train on and one to test with, or neither")
    train_set, test_set = digits() if options.train is None else (mnist(options.train), mnist(options.test))
    options.epochs = options.epochs or (6 if options.train is None else 1)
    accuracy = (train_plainly if options.plain else train)(options, train_set, test_set)
    print(f"accuracy {accuracy:.4f} on {len(test_set[1])} images")


if __name__ == "__main__":
    main()
