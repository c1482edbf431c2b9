"""What the scripts of this folder share: a small task, and a hash of the trained weights."""

import hashlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

BACKEND = os.environ["SCRIPT_BACKEND"]


def task() -> tuple[nn.Sequential, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 2000), nn.ReLU(), nn.Linear(2000, 4))
    return model, TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))


def hash_of(state: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def leave() -> None:
    """End a rank over Gloo ahead of the interpreter's teardown, which torch 2.13 aborts now and then: Gloo's
    threads outlive `destroy_process_group`, because DistributedDataParallel leaks references to its group.
    Ranks over "paceline" go through all of it."""
    if BACKEND == "gloo":
        sys.stdout.flush()
        os._exit(0)
