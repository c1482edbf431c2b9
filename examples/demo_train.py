"""A failure leaves no trace: watch a worker die in the middle of a step, and compare the bits at the end.

python examples/demo_train.py [--workers 4] [--epochs 10]

Trains a small conv net on scikit-learn's handwritten digits. One worker is killed, its place is taken by a
new one, and one more worker is added, all while it trains. Then the same training runs undisturbed. Both end
with the same weights, to the last bit; runs/report.html has both curves and the workers' timeline.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from torch import nn

import paceline
from paceline.core import events, journal
from paceline.monitor.audit import AuditResult, audit
from paceline.monitor.report import write_report

Images = tuple[torch.Tensor, torch.Tensor]

BATCH = 128
LOOK_SECONDS = 0.02


def digits() -> tuple[Images, Images]:
    """Return 1,437 images to train on and 360 to evaluate on, 8 x 8 pixels each."""
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


def train(config: paceline.TrainConfig, data: tuple[Images, Images]) -> paceline.History:
    trainer = paceline.Trainer(
        net,
        nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 2e-3),
        config=config,
    )
    return trainer.fit(*data)


class Watcher:
    """Follow the journal of a run: show its events, and with `trouble` kill and add a worker."""

    def __init__(self, run_dir: Path, steps: int, console: Console, *, trouble: bool) -> None:
        self._thread = threading.Thread(target=self._follow, name="watcher", daemon=True)
        self._file = run_dir / "journal.jsonl"
        self._run_dir, self._console, self._steps = run_dir, console, steps
        self._started = time.monotonic()
        self._over = threading.Event()
        self._members: dict[int, int] = {}  # rank -> pid
        self._lost: set[int] = set()
        self._kill_after = steps // 3 if trouble else None
        self._scale_after: int | None = None
        self._progress = Progress(
            TextColumn("  {task.completed:>4.0f}/{task.total:.0f} steps"),
            BarColumn(40),
            TextColumn("{task.fields[loss]}  {task.fields[workers]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("", total=steps, loss="", workers="starting")

    def start(self) -> None:
        self._thread.start()

    def _follow(self) -> None:
        offset = 0
        with self._progress:
            while True:
                last = self._over.is_set()
                if self._file.exists():
                    chunk = journal.read(self._file, offset)
                    offset = chunk.offset
                    for event in chunk.events:
                        self._see(event)
                if last:
                    return
                self._over.wait(LOOK_SECONDS)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def say(self, text: str) -> None:
        self._console.print(f" {time.monotonic() - self._started:5.1f} s  {text}", soft_wrap=True)

    def _see(self, event: events.Event) -> None:
        match event:
            case events.StepCommitted():
                self._progress.update(self._bar, completed=event.step, loss=f"loss {event.loss:.4f}")
                self._make_trouble(event)
            case events.ViewChanged():
                self._change(event)
            case events.Repaired():
                self.say(
                    f"[green]repaired in {event.seconds * 1000:.0f} ms[/]: the other processes train on, and "
                    "only what was lost is computed again"
                )

    def _change(self, event: events.ViewChanged) -> None:
        now = dict(zip(event.members, event.pids, strict=True))
        for rank, pid in now.items():
            if self._members and self._members.get(rank) != pid:
                what = "is back as a new process" if rank in self._lost else "joins"
                self.say(f"[green]rank {rank} {what}[/] (pid {pid}) after step {event.step}")
                self._progress.start()
                if self._kill_after == 0 and self._scale_after is None:
                    self._scale_after = max(event.step + 4, self._steps * 3 // 5)
        self._members = now
        self._progress.update(self._bar, workers=f"{len(now)} workers")

    def _make_trouble(self, event: events.StepCommitted) -> None:
        if self._kill_after and event.step >= self._kill_after:
            self._kill_after = 0
            rank = sorted(self._members)[len(self._members) // 2]
            self._lost.add(rank)
            self._over.wait(event.seconds / 2)
            # The supervisor is about to print a verdict, which a progress bar would overwrite.
            self._progress.stop()
            self.say(f"[bold]kill -9 {self._members[rank]}[/]: rank {rank}, in the middle of a step")
            with contextlib.suppress(ProcessLookupError):  # a short run may be over by now
                os.kill(self._members[rank], signal.SIGKILL)
        elif self._scale_after and event.step >= self._scale_after:
            self._scale_after = 0
            more = str(len(self._members) + 1)
            self.say(f"[bold]paceline scale {self._run_dir} --workers {more}[/]")
            command = [sys.executable, "-m", "paceline", "scale", str(self._run_dir), "--workers", more]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                self.say(f"[red]{done.stderr.strip()}[/]")


def watched(
    name: str, options: argparse.Namespace, data: tuple[Images, Images], console: Console, *, trouble: bool
) -> paceline.History:
    run_dir = fresh(Path("runs"), name)
    console.print(f"\n [bold]{name}[/]: {options.workers} workers, {run_dir}")
    config = paceline.TrainConfig(
        workers=options.workers,
        shards=2 * options.workers,  # more than workers: the shards of a lost worker are divided
        global_batch=BATCH,
        epochs=options.epochs,
        schedule="cosine",
        seed=7,
        audit_every=10,
        progress=False,
        run_dir=str(run_dir),
    )
    steps = options.epochs * -(-len(data[0][1]) // BATCH)
    watcher = Watcher(run_dir, steps, console, trouble=trouble)
    watcher.start()
    try:
        history = train(config, data)
    finally:
        watcher.stop()
    watcher.say(f"step {steps}: validation accuracy {history.evaluations[-1].metrics['accuracy']:.2%}")
    return history


def fresh(root: Path, name: str) -> Path:
    number = 1
    while (path := root / f"demo-{name}-{number}").exists():
        number += 1
    return path


def show(
    console: Console, titles: list[str], runs: list[paceline.History], proofs: list[AuditResult]
) -> bool:
    table = Table("", *titles, box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, values in (
        ("workers lost", [str(proof.lost_workers) for proof in proofs]),
        ("steps", [f"{proof.steps:,}" for proof in proofs]),
        ("done again from a checkpoint", [str(proof.redone) for proof in proofs]),
        ("samples applied", [f"{proof.samples:,}" for proof in proofs]),
        ("time", [f"{run.total_time:.1f} s" for run in runs]),
        ("validation accuracy", [f"{run.evaluations[-1].metrics['accuracy']:.2%}" for run in runs]),
    ):
        table.add_row(label, *values)
    console.print(table)
    for title, run, proof in zip(titles, runs, proofs, strict=True):
        found = "each step committed once, each sample applied once"
        found = found if proof.proved else f"[red]{proof.wrong[0]}[/]"
        console.print(f" paceline audit {run.run_dir}", soft_wrap=True)
        console.print(f"   {title}: {found}", soft_wrap=True)
    console.print("\n SHA-256 of the weights:")
    for title, run in zip(titles, runs, strict=True):
        console.print(f"   {title:<11}  {run.state_hash}", soft_wrap=True)
    same = runs[0].state_hash == runs[1].state_hash
    verdict = "[bold green]the same bits[/]" if same else "[bold red]they differ: please report this[/]"
    console.print(f"   {verdict}\n")
    return same and all(proof.proved for proof in proofs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()

    console = Console(highlight=False)
    data = digits()
    parameters = sum(parameter.numel() for parameter in net().parameters())
    console.print(
        f"{len(data[0][1]):,} images of handwritten digits, a conv net of {parameters:,} parameters, "
        f"{len(os.sched_getaffinity(0))} cores"
    )
    titles = ["disturbed", "undisturbed"]
    runs = [watched(title, options, data, console, trouble=title == "disturbed") for title in titles]
    folders = [Path(run.run_dir or "") for run in runs]
    proofs = [audit(journal.iterate(folder / "journal.jsonl")) for folder in folders]
    good = show(console, titles, runs, proofs)
    report = write_report(
        Path("runs") / "report.html", runs, titles, heading="A failure leaves no trace", journals=folders
    )
    console.print(f" Both curves and the workers' timeline: {report}")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
