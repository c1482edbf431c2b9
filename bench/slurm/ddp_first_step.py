"""A plain DDP script: writes when its first step was done to the file that is given."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 5

if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(STEPS):
        inputs, labels = torch.randn(16, 64), torch.randint(0, 10, (16,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if step == 0 and torch.distributed.get_rank() == 0:
            with open(sys.argv[1], "w") as file:
                file.write(f"{time.time()}\n")
    torch.distributed.destroy_process_group()
    # Ahead of the interpreter's teardown, which torch 2.13 aborts now and then with threads of Gloo left: the
    # other agents of torchrun would wait five minutes for that rank's.
    os._exit(0)
