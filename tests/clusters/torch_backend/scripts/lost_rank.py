"""A rank is killed in the second step of DDP."""

import os
import signal

import torch.distributed as dist
from tests.clusters.torch_backend.scripts.common import BACKEND, task
from torch.nn.parallel import DistributedDataParallel

# torchrun ends the other ranks as soon as it sees the loss: rank 0 is to have the time to say what it saw.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.init_process_group(BACKEND)
model, data = task()
parallel = DistributedDataParallel(model)
for step in range(3):
    if step == 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    parallel(data.tensors[0]).sum().backward()  # the line that an error has to name
