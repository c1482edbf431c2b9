"""A checkpoint's tensors as one plain file for other programs. Must not know stores, nor read such files."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from paceline.checkpoint.images import ImageBuffer
from paceline.checkpoint.local import LocalStorage
from paceline.core.errors import UsageError

Format = Literal["safetensors", "torch"]

MODEL = "model/"


def export(
    tensors: Mapping[str, Tensor],
    path: str | os.PathLike[str],
    *,
    format: Format = "safetensors",
    everything: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the model's tensors under their own names, or `everything` under the checkpoint's names.

    The file appears whole or not at all. "torch" is for `torch.load(..., weights_only=True)`.
    """
    if format not in get_args(Format):
        raise UsageError(f"format={format!r}", remedy=f"use one of {', '.join(get_args(Format))}")
    target = Path(path).expanduser().absolute()
    if target.is_dir() or (target.exists() and not overwrite):
        raise UsageError(f"{target} exists already", remedy="choose another path, or allow overwriting it")
    chosen = {
        name if everything else name.removeprefix(MODEL): tensor
        for name, tensor in tensors.items()
        if everything or name.startswith(MODEL)
    }
    if not chosen:
        raise UsageError(
            f"the checkpoint has no tensor whose name begins with {MODEL!r}", remedy="export everything"
        )
    storage = LocalStorage(str(target.parent))
    storage.make_folder("")
    storage.put(target.name, _safetensors(chosen) if format == "safetensors" else _torch(chosen))
    return target


def _safetensors(tensors: Mapping[str, Tensor]) -> memoryview:
    buffer = ImageBuffer()
    return buffer.image(buffer.fill(tensors, sorted(tensors)))


def _torch(tensors: Mapping[str, Tensor]) -> memoryview:
    # Clones, because torch.save writes a view's whole memory, which here is that of the whole checkpoint.
    plain: dict[str, Any] = {name: tensor.clone() for name, tensor in tensors.items()}
    file = io.BytesIO()
    torch.save(plain, file)
    return file.getbuffer()
