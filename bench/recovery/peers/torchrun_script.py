"""torch's DistributedDataParallel under torchrun: a checkpoint every 20 steps, and a start from the newest.

When a worker dies, torchrun ends the others and starts all of them again (--max-restarts).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from bench.recovery import workload
from bench.recovery.step_log import StepLog
from paceline.train.state.model_state import state_hash


def main(folder: Path, steps: int) -> None:
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model = DistributedDataParallel(workload.build_model(), gradient_as_bucket_view=True)
    optimizer = workload.build_optimizer(model.parameters())
    batches = workload.Batches()
    log = StepLog(folder, rank)
    group = os.environ["TORCHELASTIC_RESTART_COUNT"]

    checkpoint = folder / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    for step in range(first, steps):
        images, labels = batches.take(step, rank, world)
        optimizer.zero_grad(set_to_none=True)
        workload.loss_of(model, images, labels).backward()
        optimizer.step()
        log.committed(step + 1, workload.GLOBAL_BATCH, group)
        if rank == 0 and (step + 1) % workload.CHECKPOINT_EVERY == 0:
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
            }
            torch.save(state, folder / "checkpoint.new")
            os.replace(folder / "checkpoint.new", checkpoint)

    if rank == 0:
        log.finish(steps, state_hash(model.module))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
