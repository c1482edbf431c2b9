"""Hugging Face Accelerate, with gather and gradient clipping."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tests.clusters.torch_backend.scripts.common import BACKEND, hash_of, leave, task
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

dist.init_process_group(
    BACKEND
)  # by itself Accelerate knows Gloo and MPI for the CPU; it takes a group that is there
accelerator = Accelerator(cpu=True)
model, data = task()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for inputs, labels in loader:
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
assert len(accelerator.gather(loss.detach().reshape(1))) == accelerator.num_processes == 2
if accelerator.is_main_process:
    print("trained", dist.get_backend(), hash_of(accelerator.unwrap_model(model).state_dict()))
accelerator.end_training()
leave()
