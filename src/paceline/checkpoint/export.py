"""A checkpoint's tensors as one plain file for other programs."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from paceline.checkpoint.loader import Checkpoint
from paceline.checkpoint.manifest import MODEL
from paceline.checkpoint.staging_buffer import ImageBuffer
from paceline.core.errors import UsageError
from paceline.core.storage.local_storage import LocalStorage

Format = Literal["safetensors", "torch"]


def export(
    checkpoint: Checkpoint, path: str | os.PathLike[str], format: Format, everything: bool, overwrite: bool
) -> Path:
    """Write the model's tensors under the names of its state_dict, or `everything` under the checkpoint's.

    The file appears whole or not at all. "torch" is for `torch.load(..., weights_only=True)`. The
    checkpoint's state knows second names of shared tensors, buffers that a state_dict leaves out, and
    complex tensors that were saved as pairs (a safetensors file keeps those as pairs).
    """
    if format not in get_args(Format):
        raise UsageError(f"format={format!r}", remedy=f"use one of {', '.join(get_args(Format))}")
    target = Path(path).expanduser().absolute()
    if target.is_dir() or (target.exists() and not overwrite):
        raise UsageError(f"{target} exists already", remedy="choose another path, or allow overwriting it")
    chosen = {
        name if everything else name.removeprefix(MODEL): tensor
        for name, tensor in checkpoint.tensors().items()
        if everything or name.startswith(MODEL)
    }
    if not everything:
        chosen = _as_state_dict(chosen, checkpoint.state, pairs=format == "safetensors")
    if not chosen:
        raise UsageError(
            f"the checkpoint has no tensor whose name begins with {MODEL!r}", remedy="export everything"
        )
    storage = LocalStorage(str(target.parent))
    storage.make_folder("")
    if format == "safetensors":
        buffer = ImageBuffer()
        storage.put(target.name, buffer.image(buffer.fill(chosen, sorted(chosen))))
    else:
        storage.put(target.name, _torch(chosen))
    return target


def _as_state_dict(
    tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, pairs: bool
) -> dict[str, Tensor]:
    names = state.get("model", {})
    found = dict(tensors)
    if not pairs:
        for name in state.get("pairs", ()):
            if name.startswith(MODEL):
                found[name.removeprefix(MODEL)] = torch.view_as_complex(tensors[name.removeprefix(MODEL)])
    found |= {alias: found[name] for alias, name in names.get("aliases", {}).items() if name in found}
    left_out = set(names.get("not_saved", ()))
    return {name: tensor for name, tensor in found.items() if name not in left_out}


def _torch(tensors: Mapping[str, Tensor]) -> memoryview:
    # Clones, because torch.save writes a view's whole memory, which here is that of the whole checkpoint.
    plain: dict[str, Any] = {name: tensor.clone() for name, tensor in tensors.items()}
    file = io.BytesIO()
    torch.save(plain, file)
    return file.getbuffer()
