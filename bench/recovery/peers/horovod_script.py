"""Horovod elastic: workers keep a copy of the state in memory and go back to it when one of them is lost.

The others go on with a smaller group; the batch of a step is cut into as many parts as there are workers, so
no sample is left out. Horovod puts the host of a lost worker on its blacklist, so every worker has a host
name of its own here.
"""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.nn import functional

from bench.recovery import workload
from bench.recovery.step_log import StepLog
from paceline.train.state.model_state import state_hash


def main(folder: Path, steps: int) -> None:
    hvd.init()
    torch.set_num_threads(1)
    model = workload.build_model()
    inner = workload.build_optimizer(model.parameters())
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), op=hvd.Sum)
    batches = workload.Batches()
    log = StepLog(folder, hvd.rank())

    @hvd.elastic.run
    def train(state: Any) -> None:
        # Entered anew after every loss: a name that all workers of this group share.
        group = hvd.broadcast_object(uuid.uuid4().hex[:8], root_rank=0)
        while state.step < steps:
            images, labels = batches.take(state.step, hvd.rank(), hvd.size())
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels, reduction="sum")
            (loss / workload.GLOBAL_BATCH).backward()
            optimizer.step()
            state.step += 1
            log.committed(state.step, workload.GLOBAL_BATCH, group)
            if state.step % workload.CHECKPOINT_EVERY == 0:
                state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    train(state)
    if hvd.rank() == 0:
        log.finish(state.step, state_hash(model))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
