"""Exchange of data in asynchronous SGD: small messages on socket pairs, tensors in shared memory.

    server -> worker   compute: epoch, start, stop, version        end
    worker -> server   ready: pid, host                            gradient: loss, count, seconds, unused
    caller -> server   join: worker [socket, memory file]          stop: reason
                       lost: worker, pid, reason, cause
    server -> caller   first_gradient                              (once: a worker computed something)

The caller makes the socket pairs and passes them on (core/fd_messages.py). Each worker shares one memory file
with the server: the model's state one way, a gradient the other way. The messages alternate, so the memory
needs no lock.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from paceline.aggregate.async_sgd.range_allocator import SampleRange
from paceline.core import fd_messages
from paceline.core.fd_messages import receive
from paceline.train.state.model_state import model_tensors

_ALIGN: Final = 64


def send(sock: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> bool:
    """Send one message; False if the peer is gone."""
    try:
        fd_messages.send(sock, message, descriptors)
    except ConnectionError:
        return False
    return True


@final
class SharedTensors:
    """Tensors in a memory file that server and worker lay out alike: `state` and `gradients`, by name."""

    def __init__(self, descriptor: int, state: Mapping[str, Tensor], trained: Sequence[str]) -> None:
        offsets: list[tuple[Tensor, int]] = []
        size = 0
        for like in [*state.values(), *(state[name] for name in trained)]:
            offsets.append((like, size))
            size += -(-like.numel() * like.element_size() // _ALIGN) * _ALIGN
        size = max(size, _ALIGN)
        os.ftruncate(descriptor, size)  # both sides do it, to the same size
        memory = mmap.mmap(descriptor, size)
        tensors = [_tensor_at(memory, like, offset) for like, offset in offsets]
        self.state = dict(zip(state, tensors[: len(state)], strict=True))
        self.gradients = dict(zip(trained, tensors[len(state) :], strict=True))


def _tensor_at(memory: mmap.mmap, like: Tensor, offset: int) -> Tensor:
    count = math.prod(like.shape)
    if count == 0:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(memory, dtype=like.dtype, count=count, offset=offset).reshape(like.shape)


@torch.no_grad()
def copy_all(into: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy tensors by name; both mappings have the same names."""
    for name, target in into.items():
        target.copy_(source[name])


Compute = Callable[[SampleRange], tuple[float, int]]
"""Leaves the gradient of a range in the parameters' `grad`; returns the mean loss and the samples' number."""


def work(sock: socket.socket, memory_file: int, module: nn.Module, compute: Compute) -> None:
    """Run a worker: load the parameters, compute a range, return its gradient, until the server ends."""
    state = model_tensors(module)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    shared = SharedTensors(memory_file, state, list(trained))
    connected = send(sock, {"type": "ready", "pid": os.getpid(), "host": socket.gethostname()})
    while connected:
        received = receive(sock)
        if received is None or received[0]["type"] != "compute":
            return
        order = received[0]
        started = time.perf_counter()
        copy_all(state, shared.state)
        for parameter in trained.values():
            parameter.grad = None
        loss, count = compute(SampleRange(order["epoch"], order["start"], order["stop"]))
        unused = []
        with torch.no_grad():
            for index, (name, parameter) in enumerate(trained.items()):
                grad = parameter.grad
                if grad is None:
                    unused.append(index)
                else:
                    shared.gradients[name].copy_(grad.to_dense() if grad.is_sparse else grad)
            for name, _ in module.named_buffers():
                shared.state[name].copy_(state[name])
        seconds = time.perf_counter() - started
        answer = {"type": "gradient", "loss": loss, "count": count, "seconds": seconds}
        connected = send(sock, {**answer, "unused": unused})
