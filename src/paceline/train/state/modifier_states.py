"""The states of modifiers: the same on every rank, and kept in checkpoints with their tensors.

States are compared as short digests. In a checkpoint a tensor or an array lies among the tensors, as
"modifier/<position>:<class>/<path>", and a marker stands in its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.train.callbacks import Callbacks
from paceline.train.state.model_state import sparse_parts, sparse_tensor

_PREFIX = "modifier/"
_MARK = "paceline.tensor"  # the key of a marker: the tensor's name, and what it was


def digests(callbacks: Callbacks) -> dict[str, str]:
    """Return the modifiers' states, each as a short digest."""
    return {name: _digest(state) for name, state in callbacks.state_dict().items()}


def check_batch_changers(before: Mapping[str, str], callbacks: Callbacks) -> None:
    """Refuse modifiers whose change_batch has changed their state; called after the first step of a rank."""
    changed = _different(before, digests(callbacks))
    if changed:
        raise UsageError(
            f"the state of the modifier {', '.join(changed)} changed in change_batch: that is called for "
            "the micro-batches of one worker, so the state would depend on how many workers there are",
            remedy="change state in change_gradients or stop, which are called once a step on every "
            "worker; randomness needs no state, it is seeded for every shard",
        )


def compare(context: DistributedContext, callbacks: Callbacks, step: int) -> None:
    """Refuse modifiers whose states differ between ranks; called where all ranks meet anyway."""
    if context.world_size == 1:
        return
    gathered = context.all_gather(digests(callbacks))
    labels = context.labels
    for rank, theirs in zip(labels, gathered, strict=True):
        odd = _different(gathered[0], theirs)
        if odd:
            raise UsageError(
                f"the modifier {', '.join(odd)} has another state on rank {rank} than on rank {labels[0]} "
                f"after step {step}",
                remedy="a modifier must do the same on every rank: use nothing that depends on the rank, "
                "on time or on this rank's samples",
            )


def split(states: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the states with markers in the place of tensors and arrays; and these, by name, not copied."""
    found: dict[str, Tensor] = {}
    return {key: _marked(state, _PREFIX + key, found) for key, state in states.items()}, found


def joined(states: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Return what `split` was given, with tensors of their own; those that were on a GPU are on the run's."""
    return {key: _unmarked(state, tensors, device) for key, state in states.items()}


def _marked(value: Any, path: str, found: dict[str, Tensor]) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        found[path] = torch.from_numpy(np.ascontiguousarray(value))
        return {_MARK: [path, "array"]}
    if isinstance(value, Tensor):
        kind, value = value.device.type, value.detach()
        found.update(sparse_parts(value, path) if value.is_sparse else [(path, value)])
        return {_MARK: [path, f"sparse {kind}" if value.is_sparse else kind]}
    if type(value) in (list, tuple):
        return type(value)(_marked(item, f"{path}/{number}", found) for number, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _marked(item, f"{path}/{key}", found) for key, item in value.items()}
    return value


def _unmarked(value: Any, tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            path, kind = value[_MARK]
            if kind == "array":
                return tensors[path].cpu().clone().numpy()
            if kind.startswith("sparse "):
                sparse = sparse_tensor(path, tensors.__getitem__)
                return sparse.to("cpu" if kind.endswith(" cpu") else device, copy=True)
            return tensors[path].to("cpu" if kind == "cpu" else device, copy=True)
        return {key: _unmarked(item, tensors, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unmarked(item, tensors, device) for item in value)
    return value


def _digest(state: Any) -> str:
    marked, tensors = split({"": state})
    digest = xxhash.xxh3_128(json.dumps(marked, sort_keys=True, default=repr).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        # Of another layout than these (compressed rows) a checkpoint refuses it by name.
        if tensor.layout is torch.strided and tensor.numel():
            digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _different(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return sorted(name.partition(":")[2] for name in {**one, **other} if one.get(name) != other.get(name))
