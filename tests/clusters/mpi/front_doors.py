"""A script for mpirun that goes through the front doors; prints one line of JSON per rank."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from tests.train import small_run
from torch import nn

import paceline
from paceline.train.state.model_state import state_hash

# The test itself, outside of mpirun, compares with what one rank makes of it.
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


def group() -> float:
    """The process group and its plain functions."""
    context = paceline.init_process_group()
    try:
        return float(paceline.all_reduce(torch.tensor([float(context.rank + 1)])).item())
    finally:
        paceline.destroy_process_group()


def context() -> float:
    """A context of one's own."""
    with paceline.DistributedContext() as own:
        return float(own.all_reduce(torch.tensor([float(own.rank + 1)])).item())


def on_a_context(own: paceline.DistributedContext) -> dict[str, str]:
    """The trainers that are given a context, each rank with its part of the data."""
    rows, labels = small_run.data()
    start, end = paceline.DataPartitioner(len(rows), own.world_size).get_partition(own.rank)
    made = {}
    for kind in (paceline.DistributedNeuralNetTrainer, paceline.DistributedAdaptiveTrainer):
        trainer = kind(own, paceline.TrainingStrategy.DATA_PARALLEL, rows.shape[1], [8], 3, 0.01)
        if isinstance(trainer, paceline.DistributedAdaptiveTrainer):
            trainer.enable_dynamic_batching(min_batch=4, max_batch=16)
        trainer.train_epoch(rows[start:end], labels[start:end])
        made[kind.__name__] = hashlib.sha256(trainer.get_parameters().numpy().tobytes()).hexdigest()
    return made


def neural() -> dict[str, str]:
    with paceline.DistributedContext() as own:
        return on_a_context(own)


def fit(folder: Path) -> str:
    trainer = small_run.trainer(small_run.settings(folder / "fit", 1))
    history = trainer.fit(small_run.data())
    assert trainer.evaluate(small_run.data())["loss"] > 0
    return str(history.state_hash)


def ddp(folder: Path) -> str:
    """The trainer for users of DistributedDataParallel, with one worker per rank."""
    torch.manual_seed(0)
    trainer = paceline.PyTorchDDPTrainer(nn.Linear(6, 3), batch_size=6, checkpoint_dir=folder / "ddp")
    data = torch.utils.data.TensorDataset(*small_run.data())
    return str(trainer.fit(torch.utils.data.DataLoader(data, batch_size=6)).state_hash)


async def orchestrator(folder: Path) -> str:
    """Ranks are its workers, and each gets the trained model."""
    async with paceline.DistributedTrainingOrchestrator(num_workers=7) as trainer:
        result = await trainer.train_distributed(
            {"size": 500, "batch_size": 4, "epochs": 2, "run_dir": str(folder / "orchestrator")},
            {"total_samples": 64},
        )
        summary = await trainer.get_training_summary()
        assert (trainer.num_workers, summary["epochs_completed"]) == (SIZE, 2)
        assert trainer.model is not None
        trained = state_hash(trainer.model)
    assert trained == result["state_hash"]
    return trained


def session(folder: Path) -> str:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    config = small_run.settings(folder / "session", 1)
    with paceline.session(model, torch.optim.SGD(model.parameters(), 0.1), config) as run:
        for micro in run.microbatches(torch.utils.data.TensorDataset(*small_run.data())):
            run.backward(nn.functional.cross_entropy(model(micro.x), micro.y))
    return "" if run.history is None else str(run.history.state_hash)  # it is the first rank's


if __name__ == "__main__":
    where = Path(sys.argv[1])
    found: dict[str, object] = {"group": group(), "context": context(), "fit": fit(where), "ddp": ddp(where)}
    found.update(neural())
    found["orchestrator"] = asyncio.run(orchestrator(where))
    found["session"] = session(where)  # last: its group stays
    line = json.dumps({"rank": RANK, **found})
    print(f"FOUND {line}\n", end="", flush=True)  # one write, also unbuffered
