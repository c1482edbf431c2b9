"""Ray Train's TorchTrainer: a checkpoint every 20 steps, and workers that are started again from the newest.

When a worker dies, Ray Train ends its group of workers and starts a new one (FailureConfig). With a cluster's
address and a smallest number of workers it is elastic: the next group has as many workers as there is room
for, up to the workload's.
"""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch

from bench.recovery import workload
from bench.recovery.step_log import StepLog
from paceline.train.state.model_state import state_hash


def train(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    model = ray.train.torch.prepare_model(workload.build_model())
    optimizer = workload.build_optimizer(model.parameters())
    batches = workload.Batches()
    log = StepLog(Path(settings["folder"]), rank)
    # A name that all workers of this attempt share.
    names = [uuid.uuid4().hex[:8]]
    torch.distributed.broadcast_object_list(names, src=0)

    first = 0
    newest = ray.train.get_checkpoint()
    if newest is not None:
        with newest.as_directory() as place:
            saved = torch.load(Path(place, "state.pt"), weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    for step in range(first, settings["steps"]):
        images, labels = batches.take(step, rank, world)
        optimizer.zero_grad(set_to_none=True)
        workload.loss_of(model, images, labels).backward()
        optimizer.step()
        log.committed(step + 1, workload.GLOBAL_BATCH, names[0])
        if (step + 1) % workload.CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as place:
                checkpoint = None
                if rank == 0:
                    state = {
                        "model": model.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step + 1,
                    }
                    torch.save(state, Path(place, "state.pt"))
                    checkpoint = ray.train.Checkpoint.from_directory(place)
                ray.train.report({"step": step + 1}, checkpoint=checkpoint)
    if rank == 0:
        log.finish(settings["steps"], state_hash(model.module))


def main(folder: Path, steps: int, address: str = "", fewest: str = "") -> None:
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        # Ray hands workers to cores; here there are more workers than cores for every contender.
        ray.init(num_cpus=workload.WORKERS + 1, include_dashboard=False, log_to_driver=False)
    elastic: dict[str, Any] = {"num_workers": workload.WORKERS}
    if fewest:
        # Its default looks for new nodes once a minute.
        elastic = {"num_workers": (int(fewest), workload.WORKERS), "elastic_resize_monitor_interval_s": 5}
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "steps": steps},
        scaling_config=ray.train.ScalingConfig(use_gpu=False, **elastic),
        run_config=ray.train.RunConfig(
            name="recovery",
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=3),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    main(Path(sys.argv[1]).absolute(), int(sys.argv[2]), *sys.argv[3:])
