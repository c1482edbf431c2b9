"""State that a module carries from batch to batch in a plain attribute: found in the first steps, and named.

Parameters and buffers belong to the step: every shard starts from the same ones. An attribute (the hidden
state of an LSTM in `self.h`, a counter) goes from one micro-batch to the next of the same worker, so the
numbers depend on how many workers there are. A cache is a function of shapes: made again, it is the same.
What requires a gradient is of one backward pass and cannot be read in the next. Must not know the loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, final

import torch
import xxhash
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_LOOKS = 4  # micro-batches of a process that are looked at
_OF_TORCH = frozenset(vars(nn.Module()))


@final
class CarriedState:
    """Looks at a model's attributes after each of the first micro-batches, and says once what it found."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._left = _LOOKS
        self._tensors: dict[tuple[str, object], str] = {}  # by attribute and shape: the digest
        self._numbers: dict[str, list[float]] = {}

    def look(self, *, warn: bool) -> None:
        if not self._left:
            return
        self._left -= 1
        found = []
        for name, value in _attributes(self._module):
            if isinstance(value, Tensor):
                key = (name, (value.shape, value.dtype))
                digest = _digest(value)
                if self._tensors.setdefault(key, digest) != digest:
                    found.append(name)
            else:
                self._numbers.setdefault(name, []).append(value)
        if not self._left:
            found += [name for name, values in self._numbers.items() if _counts(values)]
        if found:
            self._left = 0
            if warn:
                self._say(found)

    def _say(self, found: list[str]) -> None:
        names = sorted(set(found))
        _log.warning(
            "%s of the model %s changes with every batch and is neither a parameter nor a buffer: it goes "
            "from one batch to the next of the same worker only, so if forward reads it, the weights depend "
            "on the number of workers, and no checkpoint holds it; start every batch from the same state, or "
            "make it a buffer (register_buffer)",
            ", ".join(names[:5]) + (" ..." if len(names) > 5 else ""),
            type(self._module).__name__,
        )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tensors without a gradient and numbers that modules keep in themselves, with where they are."""
    for path, child in module.named_modules():
        for name, value in list(vars(child).items()):
            if name not in _OF_TORCH:
                yield from _values(f"{path}.{name}" if path else name, value, 2)


def _values(name: str, value: Any, deep: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and value.device.type != "meta"
        if plain and not value.requires_grad and not isinstance(value, nn.Parameter):
            yield name, value
    elif type(value) in (int, float):
        yield name, float(value)
    elif deep and isinstance(value, list | tuple):
        for item in value[:8]:
            yield from _values(name, item, deep - 1)
    elif deep and isinstance(value, dict):
        for item in list(value.values())[:8]:
            yield from _values(name, item, deep - 1)


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(plain.view(torch.uint8).numpy().data if plain.numel() else b"")


def _counts(values: list[float]) -> bool:
    """By the same amount with every batch; a number that follows a batch's shape does not."""
    steps = {after - before for before, after in pairwise(values)}
    return len(values) == _LOOKS and len(steps) == 1 and steps != {0.0}
