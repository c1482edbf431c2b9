"""A script as Horovod's users have it, with paceline.HorovodTrainer: one JSON line for each rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.train.history import StepRecord

settings = json.loads(sys.argv[1])
gate = Path(settings.get("gate", "none"))
signalled, wake = socket.socketpair()  # a byte for each signal, also for one that comes before recv
wake.setblocking(False)
signal.set_wakeup_fd(wake.fileno())
torch.manual_seed(0)
inputs = torch.randn(settings.get("samples", 128), 8)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
shuffled = settings.get("shuffle", settings.get("samples") != 0)
loader = DataLoader(data, batch_size=8, shuffle=shuffled)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
second = os.environ.get("HOROVOD_RANK") == "1"
if settings.get("other_model") and second:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
if settings.get("other_length") and second:
    loader = DataLoader(TensorDataset(inputs[:32], (inputs[:32].sum(1) > 0).long()), batch_size=8)
validation = None if settings.get("other_validation") and second else loader
if settings.get("other_passes") and second:
    settings["config"] = {"gradient_accumulation_steps": 2}
if settings.get("again") == "thawed":
    model[0].requires_grad_(False)
loss, calls = nn.CrossEntropyLoss(), [0]


def objective(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    calls[0] += 1
    waits = os.environ.get("HOROVOD_RANK") == settings.get("victim") and not gate.exists()
    if waits and calls[0] == settings.get("call", 12):
        gate.write_text(str(os.getpid()))
        signalled.recv(1)  # until the test kills this rank, or asks it to stop
    result: torch.Tensor = loss(model(batch[0]), batch[1])
    return result


compression = settings.get("compression")
if compression == "hvd.Compression.fp16":
    import horovod.torch as hvd

    compression = hvd.Compression.fp16


class HostsChanged(threading.Event):
    def on_hosts_updated(self, timestamp: float, update: int) -> None:
        self.set()


class UntilHostsChange(paceline.Observer):
    """Has the chief wait in a step until Horovod's driver tells it of another host."""

    def on_step(self, record: StepRecord) -> None:
        if record.step == 6:
            from horovod.common.elastic import notification_manager

            changed = HostsChanged()
            notification_manager.register_listener(changed)
            gate.write_text(str(os.getpid()))
            changed.wait()


if settings.get("again"):
    os.chdir(Path(settings["folder"]).parent)  # each training has a folder of its own below it
given: dict[str, Any] = {
    "loss_fn": objective if "victim" in settings else loss,
    "verbose": settings.get("verbose", False),
    "compression": compression,
    "checkpoint_dir": None if settings.get("again") else settings["folder"],
    "resume_from_checkpoint": settings.get("resume", False),
    "timeline": settings.get("timeline"),
    "commit_steps": 4,
    "lr_rule": settings.get("lr_rule", "linear"),
    "config": settings.get("config"),
    "callbacks": [paceline.CsvLog(every=1), *([UntilHostsChange()] if "joins" in settings else [])],
}
if settings.get("chosen"):  # optimizer and loss are left to the trainer
    del given["loss_fn"]
else:
    given["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
make: Any = paceline.make_trainer if settings.get("made") else paceline.HorovodTrainer
trainer = make(model, **given)
history = trainer.fit(loader, epochs=settings.get("epochs", 2), val_loader=validation)
if settings.get("again"):
    model.requires_grad_(True)
    if settings["again"] == "trainer":
        trainer = make(model, **given)
    history = trainer.fit(loader, epochs=settings.get("epochs", 2), val_loader=loader)
found = {
    "rank": trainer.rank,
    "size": trainer.size,
    "hash": history.state_hash,
    "own_hash": paceline.state_hash(model),
    "steps": [record.step for record in history.steps],
    "epoch_samples": [record.samples for record in history.epochs],
    "rates": [history.steps[0].learning_rate, history.steps[-1].learning_rate],
    "losses": [history.epochs[0].loss, history.final_loss],
    "accuracy": history.best_accuracy,
    "workers": history.workers,
    "weights": [value for one in model.parameters() for value in one.flatten().tolist()],
    "average": trainer.metric_average(float(trainer.rank), name="rank"),
}
print("FOUND " + json.dumps(found) + "\n", end="", flush=True)  # one write, also unbuffered
