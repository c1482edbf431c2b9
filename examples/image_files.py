"""Images for the examples: the files of MNIST and CIFAR-10 in their standard formats, or images that ship
with scikit-learn."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Images = tuple[Tensor, Tensor]

_IDX_TYPES = {0x08: np.uint8, 0x09: np.int8, 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CIFAR_RECORD = 1 + 3 * 32 * 32


def mnist(images: str) -> Images:
    """Read an IDX file of images, such as train-images-idx3-ubyte (.gz too), and the labels beside it."""
    name = Path(images).name
    labels = str(Path(images).with_name(name.replace("images", "labels").replace("idx3", "idx1")))
    if "images" not in name:
        raise SystemExit(
            f"{images}: no file of labels is named like it (…-images-idx3-… and …-labels-idx1-…)"
        )
    pixels, classes = _idx(images), _idx(labels)
    if pixels.ndim != 3 or classes.ndim != 1 or len(pixels) != len(classes):
        raise SystemExit(f"{images} has the shape {pixels.shape}, and {labels} {classes.shape}")
    return torch.tensor(pixels).unsqueeze(1).float() / 255, torch.tensor(classes).long()


def cifar10(*files: str) -> Images:
    """Read files in CIFAR-10's binary format: records of one byte of label and 32 x 32 pixels in 3 planes."""
    parts = []
    for file in files:
        data = np.frombuffer(_bytes(file), np.uint8)
        if not len(data) or len(data) % _CIFAR_RECORD:
            raise SystemExit(f"{file}: {len(data)} bytes are no whole number of records of {_CIFAR_RECORD}")
        parts.append(data.reshape(-1, _CIFAR_RECORD))
    rows = np.concatenate(parts)
    pixels = torch.tensor(rows[:, 1:].reshape(-1, 3, 32, 32)).float() / 255
    return pixels, torch.tensor(rows[:, 0]).long()


def digits() -> tuple[Images, Images]:
    """Return scikit-learn's handwritten digits: 1,437 to train on and 360 to test, 8 x 8 pixels each."""
    found = _scikit_images("load_digits")
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return (images[order[:1437]], labels[order[:1437]]), (images[order[1437:]], labels[order[1437:]])


def photographs() -> tuple[Images, Images]:
    """Return pieces of 32 x 32 pixels of scikit-learn's two photographs, of which the left part is to train
    on and the right one to test; the class is the photograph."""
    parts: dict[bool, list[tuple[Tensor, int]]] = {True: [], False: []}
    for label, photograph in enumerate(_scikit_images("load_sample_images").images):
        pixels = torch.tensor(photograph).permute(2, 0, 1).float() / 255
        for top in range(0, pixels.shape[1] - 32, 24):
            for left in range(0, pixels.shape[2] - 32, 24):
                parts[left < 480].append((pixels[:, top : top + 32, left : left + 32], label))
    sets = [
        (torch.stack([p for p, _ in part]), torch.tensor([c for _, c in part])) for part in parts.values()
    ]
    return sets[0], sets[1]


def _idx(file: str) -> np.ndarray:
    data = _bytes(file)
    zeros, kind, dimensions = struct.unpack_from(">HBB", data) if len(data) >= 4 else (1, 0, 0)
    if zeros or kind not in _IDX_TYPES:
        raise SystemExit(f"{file} is no IDX file, the format of MNIST")
    try:
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
        return np.frombuffer(data, _IDX_TYPES[kind], offset=4 + 4 * dimensions).reshape(shape)
    except (struct.error, ValueError):
        raise SystemExit(
            f"{file} is not whole: it has {len(data)} bytes, other than its header says"
        ) from None


def _bytes(file: str) -> bytes:
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise SystemExit(f"{file}: {error.strerror}") from None
    try:
        return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise SystemExit(f"{file} cannot be decompressed: {error}") from None


def _scikit_images(function: str) -> Any:
    """Call a function of sklearn.datasets."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise SystemExit(f"{error}: pip install scikit-learn, or give files of images") from None
    return getattr(datasets, function)()
