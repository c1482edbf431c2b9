"""The tensors of a model by name, as checkpoints hold them, and their hash; tensors that no file can hold as
they are (complex128, sparse), as others that it can. All names of a checkpoint are listed in run_state.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from paceline.core.errors import UsageError
from paceline.train.step.step_hashes import add_tensor

MODEL = "model/"
RESIDUAL = "residual/"


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, each once however often it is used; not copied."""
    found: dict[str, Tensor] = {name: parameter.detach() for name, parameter in module.named_parameters()}
    found.update({name: buffer.detach() for name, buffer in module.named_buffers()})
    return found


def state_hash(module: nn.Module) -> str:
    """Return the SHA-256 over parameters and buffers in the order of their names.

    Of each: the name in UTF-8, a zero byte, the dtype, a zero byte, the shape as "2,3", a zero byte, the
    elements' raw bytes in row-major order.
    """
    return hash_of(model_tensors(module))


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """Return what `state_hash` returns of a module with these parameters and buffers."""
    return _hashed(tensors, hashlib.sha256())


def quick_hash(module: nn.Module) -> str:
    """Hash the same bytes as `state_hash`; quick, and not cryptographic."""
    return _hashed(model_tensors(module), xxhash.xxh3_128())


def _hashed(tensors: Mapping[str, Tensor], digest: Any) -> str:
    for name, tensor in sorted(tensors.items()):
        add_tensor(digest, name, tensor)
    return str(digest.hexdigest())


def as_pairs(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the same tensors with those of complex128, which safetensors does not know, as pairs of doubles;
    and the names of these. Nothing is copied."""
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    return {**tensors, **{name: torch.view_as_real(tensors[name]) for name in pairs}}, sorted(pairs)


def from_pairs(tensors: Mapping[str, Tensor], pairs: Sequence[str]) -> dict[str, Tensor]:
    return {**tensors, **{name: torch.view_as_complex(tensors[name]) for name in pairs}}


def sparse_parts(tensor: Tensor, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a sparse tensor as dense ones by name, for files, peers and hashes; not copied.

        <path>.indices    one column per stored value
        <path>.values     in the same order
        <path>.about      whether it is coalesced, how many dimensions are sparse, and its size

    An optimizer with momentum keeps such a tensor for an embedding with sparse gradients. One that is not
    coalesced stays so: where an index comes twice, the order of the values is the order in which they will be
    added.
    """
    about = [int(tensor.is_coalesced()), tensor.sparse_dim(), *tensor.shape]
    yield f"{path}.indices", tensor._indices()
    yield f"{path}.values", tensor._values()
    yield f"{path}.about", torch.tensor(about, dtype=torch.int64, device="cpu")


def sparse_tensor(path: str, tensor_at: Callable[[str], Tensor]) -> Tensor:
    """Return the sparse tensor whose parts `tensor_at` finds, with the same bits."""
    values = tensor_at(f"{path}.values")
    coalesced, _, *size = tensor_at(f"{path}.about").tolist()
    indices = tensor_at(f"{path}.indices").to(values.device)
    try:
        # Checked: an index beyond the size, from a damaged file, would have memory of others written to.
        return torch.sparse_coo_tensor(
            indices, values, tuple(size), is_coalesced=bool(coalesced), check_invariants=True
        )
    except RuntimeError as error:
        raise UsageError(
            f"the parts of {path} do not make a sparse tensor: {error}",
            remedy="resume from another version of the checkpoint",
        ) from error


def model_names(module: nn.Module) -> dict[str, Any]:
    """Return what the names lack: second names of shared tensors, and buffers that torch does not save."""
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
def load_model(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    remedy: str = "resume with the model that the checkpoint was written with",
) -> None:
    """Copy "model/..." tensors into the module, which has to have exactly these; all of them, or none."""
    saved = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    here = model_tensors(module)
    differ = sorted(set(saved) ^ set(here))
    if differ:
        where = [
            f"{name} ({'only in the checkpoint' if name in saved else 'only in the model'})"
            for name in differ
        ]
        raise UsageError(f"the checkpoint is of another model: {_some(where)}", remedy=remedy)
    unlike = [
        f"{name} is {tensor.dtype} {tuple(tensor.shape)} in the model and "
        f"{saved[name].dtype} {tuple(saved[name].shape)} in the checkpoint"
        for name, tensor in here.items()
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype
    ]
    if unlike:
        raise UsageError(_some(unlike), remedy=remedy)
    for name, tensor in here.items():
        tensor.copy_(saved[name])


def _some(texts: Sequence[str]) -> str:
    return f"{'; '.join(texts[:5])}{' ...' if len(texts) > 5 else ''}"
