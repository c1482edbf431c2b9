"""torchft's live failover: one replica group of one worker each, as many as there are workers.

The others go on without a lost replica once the lighthouse has missed its heartbeats; its samples of these
steps are not used. A replica is started by a torchrun of its own, which starts it again when it died;
it then takes the weights from another replica. Samples are chosen by the step's number, so a step that is
tried again loses nothing.

Gradients are one buffer that goes through `manager.allreduce`: torchft's DistributedDataParallel ends every
replica with an assertion when a peer is lost in the middle of an all-reduce over Gloo (0.2.0 on torch 2.13).
A replica that does not hear of the loss from Gloo waits for the timeout of its collective: one second here,
where the default is a minute.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchft import Manager, Optimizer, ProcessGroupGloo

from bench.recovery import workload
from bench.recovery.step_log import FINAL, StepLog
from paceline.train.state.model_state import state_hash


def flat_gradient(model: nn.Module) -> Tensor:
    """One buffer that all gradients are views of."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    return flat


def wait_for_all(folder: Path, replica: int, replicas: int) -> None:
    """At the first start, no replica trains before all are there: else it is another run each time."""
    (folder / f"ready-{replica}").touch()
    while len(list(folder.glob("ready-*"))) < replicas:
        time.sleep(0.05)


def main(folder: Path, steps: int) -> None:
    replica = int(os.environ["REPLICA_GROUP_ID"])
    replicas = int(os.environ["NUM_REPLICA_GROUPS"])
    model = workload.build_model()
    inner = workload.build_optimizer(model.parameters())
    batches = workload.Batches()
    log = StepLog(folder, replica)

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=1)),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=state,
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=10),
    )
    optimizer = Optimizer(manager, inner)
    flat = flat_gradient(model)
    wait_for_all(folder, replica, replicas)
    # One that comes back after the end would train from the first step on, alone.
    while manager.current_step() < steps and not (folder / FINAL).exists():
        before = manager.current_step()
        images, labels = batches.take(before, replica, replicas)
        optimizer.zero_grad(set_to_none=False)
        workload.loss_of(model, images, labels).backward()
        manager.allreduce(flat).wait()
        optimizer.step()
        after = manager.current_step()
        if after > before:
            # The number of the quorum has no public name; it is only logged.
            group, taken = str(manager._quorum_id), manager.num_participants()
            log.committed(after, workload.GLOBAL_BATCH * taken // replicas, group)
    if manager.current_step() == steps:
        log.finish(steps, state_hash(model))
    manager.shutdown()
    # Threads of the process group may keep the process from ending by itself.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
