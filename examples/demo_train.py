"""Real images, one training run, two numbers of workers: the weights are the same bits.

python examples/demo_train.py [--workers 4] [--epochs 8]

Trains a small conv net on scikit-learn's handwritten digits, on several workers and then on one, and writes
runs/report.html with both curves.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn

import paceline
from paceline.train.report import write_report

Images = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Images, Images]:
    """1,437 images to learn from and 360 to be judged by, 8 x 8 pixels each."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("the images are scikit-learn's: pip install 'paceline[demo]'") from error
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1437], order[1437:]
    return (images[train], labels[train]), (images[validation], labels[validation])


def net() -> nn.Module:
    """Dropout draws random numbers and BatchNorm keeps averages: both come out alike, too."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(workers: int, shards: int, epochs: int, data: tuple[Images, Images]) -> paceline.History:
    trainer = paceline.Trainer(
        net,
        nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 2e-3),
        config=paceline.TrainConfig(
            workers=workers,
            shards=shards,
            global_batch=128,
            epochs=epochs,
            schedule="cosine",
            seed=7,
            log_every=10_000,  # a line per epoch is enough where there is no terminal for a bar
            name=f"demo-{workers}",
        ),
    )
    return trainer.fit(*data)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    console = Console(highlight=False)
    data = digits()
    parameters = sum(parameter.numel() for parameter in net().parameters())
    console.print(
        f"{len(data[0][1]):,} images of handwritten digits, a conv net of {parameters:,} parameters, "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    runs = []
    for workers in (options.workers, 1):
        console.print()
        runs.append(train(workers, options.workers, options.epochs, data))
    titles = [f"{run.workers} worker{'s' if run.workers > 1 else ''}" for run in runs]

    table = Table("", "time", "samples/s", "validation accuracy", box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for title, run in zip(titles, runs, strict=True):
        accuracy = run.evaluations[-1].metrics["accuracy"]
        table.add_row(title, f"{run.total_time:.1f} s", f"{run.samples_per_second:,.0f}", f"{accuracy:.2%}")
    console.print(table)
    console.print(" SHA-256 of the weights:")
    for title, run in zip(titles, runs, strict=True):
        console.print(f"   {title:<{len(titles[0])}}  {run.state_hash}", soft_wrap=True)
    same = runs[0].state_hash == runs[1].state_hash
    verdict = "[bold green]the same bits[/]" if same else "[bold red]they differ: please report this[/]"
    console.print(f"   {verdict}\n")
    report = write_report(Path("runs") / "report.html", runs, titles, heading="Handwritten digits")
    console.print(f" The curves of both: {report}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
