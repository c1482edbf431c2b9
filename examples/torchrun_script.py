"""A plain script for torchrun: torch's own DistributedDataParallel, and not a word of Paceline.

torchrun --nproc-per-node 2 examples/torchrun_script.py
paceline run --nproc-per-node 2 examples/torchrun_script.py       the same, from a warm start
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(2_000, 20, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, :3].sum(1) > 0).long())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=50, sampler=sampler):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = float((model(x).argmax(1) == data.tensors[1]).float().mean())
    dist.destroy_process_group()
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
