"""A worker of asynchronous SGD: takes the parameters, computes a range, hands the gradient in, until told to
end or the server is gone.

Must not know how a batch is read or scored: `compute` does that.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from paceline.aggregate.async_memory import SharedMemory, copy_all, state_of
from paceline.aggregate.async_messages import receive, send
from paceline.aggregate.dealing import Range


@dataclass(frozen=True)
class Computed:
    """The mean loss over `count` samples, whose gradient is in the parameters' `grad`."""

    loss: float
    count: int


Compute = Callable[[Range], Computed]


def work(sock: socket.socket, memory_file: int, module: nn.Module, compute: Compute) -> None:
    """Serves until the end; returns also when the server is gone, which others report."""
    state = state_of(module)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    shared = SharedMemory(memory_file, state, list(trained))
    going = send(sock, {"say": "ready", "pid": os.getpid(), "host": socket.gethostname()})
    while going:
        heard = receive(sock)
        if heard is None or heard[0]["do"] != "compute":
            return
        order = heard[0]
        started = time.perf_counter()
        copy_all(state, shared.state)
        for parameter in trained.values():
            parameter.grad = None
        done = compute(Range(order["epoch"], order["start"], order["stop"]))
        unused = []
        with torch.no_grad():
            for place, (name, parameter) in enumerate(trained.items()):
                if parameter.grad is None:
                    unused.append(place)
                else:
                    grad = parameter.grad
                    shared.gradients[name].copy_(grad.to_dense() if grad.is_sparse else grad)
            for name, _ in module.named_buffers():
                shared.state[name].copy_(state[name])
        going = send(
            sock,
            {
                "say": "done",
                "loss": done.loss,
                "count": done.count,
                "seconds": time.perf_counter() - started,
                "unused": unused,
            },
        )
