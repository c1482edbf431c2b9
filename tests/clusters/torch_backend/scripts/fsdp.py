"""torch's FSDP2: each layer and the whole model sharded, with a checkpoint's full state at the end."""

import torch
import torch.distributed as dist
from tests.clusters.torch_backend.scripts.common import BACKEND, hash_of, leave, task
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group(BACKEND)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model, data = task()
for layer in (model[0], model[2], model[4], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, labels = data.tensors
mine = slice(dist.get_rank(), None, dist.get_world_size())
for _ in range(4):
    optimizer.zero_grad()
    cross_entropy(model(inputs[mine]), labels[mine]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if dist.get_rank() == 0:
    print("trained", dist.get_backend(), hash_of(state))
dist.destroy_process_group()
leave()
