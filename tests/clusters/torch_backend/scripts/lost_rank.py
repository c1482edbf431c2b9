"""A rank is killed in the second step: of DDP, of DDP beside a message that never comes, or of FSDP2."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from tests.clusters.torch_backend.scripts.common import BACKEND, task
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

loop = sys.argv[1]
# torchrun ends the other ranks as soon as it sees the loss: rank 0 is to have the time to say what it saw.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group(BACKEND)
model, data = task()
message = dist.irecv(torch.zeros(1), 1 - dist.get_rank()) if loop == "messages" else None
parallel: nn.Module = model
if loop == "fsdp":
    fully_shard(model)
else:
    parallel = DistributedDataParallel(model)
for step in range(3):
    if step == 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    parallel(data.tensors[0]).sum().backward()  # the line that an error has to name
