"""Lightning's Trainer with everything off that costs time: no bar, logger, checkpoints or summary."""

from __future__ import annotations

import logging
import time
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from bench.train.loader import loader
from bench.train.turns import Block
from bench.train.workload import WORKLOADS, Workload, loss_of


class Module(lightning.LightningModule):
    """A workload as Lightning wants it."""

    def __init__(self, work: Workload) -> None:
        super().__init__()
        self.work = work
        self.model: nn.Module = work.model()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return loss_of(self.model, *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.work.optimizer(self.parameters())


class StepClock(lightning.Callback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())


def prepare(workers: int, *, workload: str) -> Block:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    work = WORKLOADS[workload]
    data = loader(work.data(workers), work.batch)

    def block(warmup: int, steps: int) -> dict[str, Any]:
        clock = StepClock()
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=workers,
            strategy=_strategy(workers),
            max_steps=warmup + steps,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(work), data)
        if trainer.world_size != workers or len(clock.ends) != warmup + steps:
            raise RuntimeError(f"{trainer.world_size} processes did {len(clock.ends)} steps")
        return {"seconds": clock.ends[-1] - clock.ends[warmup - 1]}

    return block


def _strategy(workers: int) -> Strategy:
    if workers == 1:
        return SingleDeviceStrategy("cpu")
    return DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
