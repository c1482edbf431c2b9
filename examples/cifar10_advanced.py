"""A ResNet on CIFAR-10, the advanced way: augmentation, one cycle of the learning rate, averaged weights, the
best version loaded at the end.

    python examples/cifar10_advanced.py data_batch_1.bin test_batch.bin       CIFAR-10's binary version
    python examples/cifar10_advanced.py                                       pieces of two photographs
    mpirun -np 4 python examples/cifar10_advanced.py
    paceline run --nproc-per-node 4 examples/cifar10_advanced.py

Several training files are given as one argument with commas. `--plain` trains the same in a loop of torch
alone, for comparison.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline
from image_files import Images, cifar10, photographs

BATCH = 64


class Block(nn.Module):
    """Two convolutions around a shortcut. GroupNorm: its statistics are of a sample, whatever the batch."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)])
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(out)) + self.shortcut(x))


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def augmented(images: Tensor) -> Tensor:
    """Shift and mirror: drawn from torch's generator, which is seeded for each slice of a batch."""
    left, top = torch.randint(0, 9, (2,)).tolist()
    shifted = F.pad(images, (4, 4, 4, 4))[:, :, top : top + 32, left : left + 32]
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    return torch.where(mirrored, shifted.flip(3), shifted)


def objective(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    images, labels = batch
    output = model(augmented(images) if model.training else images)
    loss = F.cross_entropy(output, labels, label_smoothing=0.05 if model.training else 0.0)
    return loss, {"accuracy": (output.argmax(1) == labels).float().mean()}


def one_cycle(optimizer: torch.optim.Optimizer, total_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=total_steps)


def train(options: argparse.Namespace, train_set: Images, test_set: Images) -> float:
    config = paceline.TrainConfig(
        workers=options.workers,
        global_batch=BATCH,
        epochs=options.epochs,
        clip_norm=1.0,
        scheduler_interval="step",
        checkpoint=paceline.CheckpointConfig(metric="accuracy", mode="max", keep_best=1),
    )
    ema = paceline.EMA(0.9)
    trainer = paceline.Trainer(
        resnet,
        objective,
        optimizer=lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.01),
        scheduler=one_cycle,
        config=config,
        callbacks=[ema],
    )
    history = trainer.fit(train_set, test_set)
    print(f"weights {history.state_hash[:16]}, saved in {history.run_dir}")
    trainer.load("best")
    return trainer.evaluate(test_set)["accuracy"]


def train_plainly(options: argparse.Namespace, train_set: Images, test_set: Images) -> float:
    torch.manual_seed(0)
    model = resnet()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.01)
    scheduler = one_cycle(optimizer, options.epochs * -(-len(train_set[1]) // BATCH))
    for _ in range(options.epochs):
        model.train()
        for rows in torch.randperm(len(train_set[1])).split(BATCH):
            optimizer.zero_grad()
            objective(model, (train_set[0][rows], train_set[1][rows]))[0].backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
    model.eval()
    with torch.no_grad():
        return float((model(test_set[0]).argmax(1) == test_set[1]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("train", nargs="?", help="files of the binary version, with commas between them")
    parser.add_argument("test", nargs="?")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="train in a loop of torch alone")
    options = parser.parse_args()
    if (options.train is None) != (options.test is None):
        parser.error("give files to train on and one to test with, or neither")
    train_set, test_set = (
        photographs()
        if options.train is None
        else (cifar10(*options.train.split(",")), cifar10(options.test))
    )
    accuracy = (train_plainly if options.plain else train)(options, train_set, test_set)
    print(f"accuracy {accuracy:.4f} on {len(test_set[1])} images")


if __name__ == "__main__":
    main()
