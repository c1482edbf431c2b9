"""Everything a run is, as tensors by name and plain data: what a checkpoint holds, and its hash.

Tensors: parameters and buffers as "model/<name>", optimizer state as "optimizer/<number>/<parameter>/<key>",
what compression still owes as "residual/<dtype>/<shard>"; complex128 as pairs of doubles. The rest is plain
data for JSON. Randomness needs no entry of its own: generators are seeded from (seed, epoch, step, shard), so
the position says it all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from paceline.core.errors import UsageError

MODEL = "model/"
RESIDUAL = "residual/"


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once however often it is used; not copied."""
    found: dict[str, Tensor] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    found.update({name: buffer.detach() for name, buffer in module.named_buffers()})
    return found


def state_hash(module: nn.Module) -> str:
    """SHA-256 over parameters and buffers in the order of their names.

    Of each: the name in UTF-8, a zero byte, the dtype, a zero byte, the shape as "2,3", a zero byte, the
    elements' raw bytes in row-major order.
    """
    return _hashed(module, hashlib.sha256())


def quick_hash(module: nn.Module) -> str:
    """Tells weights apart by the same bytes as `state_hash`; quick, and no proof against anybody."""
    return _hashed(module, xxhash.xxh3_128())


def _hashed(module: nn.Module, digest: Any) -> str:
    for name, tensor in sorted(model_tensors(module).items()):
        shape = ",".join(str(side) for side in tensor.shape)
        digest.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{shape}\0".encode())
        data = tensor.detach().cpu().contiguous()
        if data.numel():
            digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())


def as_pairs(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The same tensors with those of complex128, which safetensors does not know, as pairs of doubles; and
    the names of these. Nothing is copied."""
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    return {**tensors, **{name: torch.view_as_real(tensors[name]) for name in pairs}}, sorted(pairs)


def from_pairs(tensors: Mapping[str, Tensor], pairs: Sequence[str]) -> dict[str, Tensor]:
    return {**tensors, **{name: torch.view_as_complex(tensors[name]) for name in pairs}}


def model_names(module: nn.Module) -> dict[str, Any]:
    """What names alone do not say: second names of shared tensors, and buffers that are not saved."""
    first: dict[int, str] = {id(tensor): name for name, tensor in module.named_parameters()}
    first.update({id(tensor): name for name, tensor in module.named_buffers()})
    everything = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    aliases = {name: first[id(tensor)] for name, tensor in everything if first[id(tensor)] != name}
    kept = module.state_dict(keep_vars=True)
    return {
        "aliases": aliases,
        "not_saved": sorted(name for name, _ in everything if name not in kept),
    }


@torch.no_grad()
def load_model(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Puts "model/..." tensors into the module, which has to have exactly these."""
    saved = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    here = model_tensors(module)
    differ = sorted(set(saved) ^ set(here))
    if differ:
        where = [
            f"{name} ({'only in the checkpoint' if name in saved else 'only in the model'})"
            for name in differ
        ]
        raise UsageError(
            f"the checkpoint is of another model: {', '.join(where[:5])}{' ...' if len(where) > 5 else ''}",
            remedy="resume with the model that the checkpoint was written with",
        )
    for name, tensor in here.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise UsageError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the model and "
                f"{saved[name].dtype} {tuple(saved[name].shape)} in the checkpoint",
                remedy="resume with the model that the checkpoint was written with",
            )
        tensor.copy_(saved[name])
