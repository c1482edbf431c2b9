"""The plain DDP script of bench/launcher.py; knows nothing of what started it. Leaves a file for its first
step, with its process and the time, then trains until there is a file `end`.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
    written = False
    end = torch.zeros(1)
    while not end.item():
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        if not written:
            written = True
            name = f"{folder}/first-{attempt}-{rank}"
            with open(f"{name}.part", "w") as file:
                file.write(f"{os.getpid()} {time.monotonic()}")
            os.rename(f"{name}.part", name)
        end = torch.tensor([float(os.path.exists(f"{folder}/end"))])
        dist.all_reduce(end)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
