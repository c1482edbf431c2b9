"""torch's DDP, as its tutorial writes it."""

from typing import Any

import torch
import torch.distributed as dist
from tests.clusters.torch_backend.scripts.common import BACKEND, hash_of, leave, task
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(BACKEND)
model, data = task()
parallel = DistributedDataParallel(model, bucket_cap_mb=1)
sampler: DistributedSampler[Any] = DistributedSampler(data)
loader = DataLoader(data, batch_size=8, sampler=sampler)
optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        cross_entropy(parallel(inputs), labels).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print("trained", dist.get_backend(), hash_of(model.state_dict()))
dist.destroy_process_group()
leave()
