"""State that a module carries from batch to batch in a plain attribute: found in the first steps, and named.

Parameters and buffers belong to the step: every shard starts from the same ones. An attribute (the hidden
state of an LSTM in `self.h`, a counter) goes from one micro-batch to the next of the same worker, so the
numbers depend on how many workers there are. A cache is a function of shapes: made again, it is the same.
What requires a gradient is of one backward pass and cannot be read in the next.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, final

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_LOOKS = 4  # micro-batches of a process that are looked at
_DEEP = 3  # containers within containers
_ITEMS = 8  # of a container
_WITHIN = "\0"  # between a container's name and what of it is meant
_OF_TORCH = frozenset(vars(nn.Module()))


@final
class CarriedState:
    """Compares a model's attributes after each of the first micro-batches, and warns once."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._left = _LOOKS
        self._digests: dict[object, str] = {}  # by attribute and, of a tensor, shape and dtype
        self._numbers: dict[str, list[float]] = {}

    def look(self, *, warn: bool) -> None:
        if not self._left:
            return
        self._left -= 1
        found = []
        for name, value in _attributes(self._module):
            if isinstance(value, float):
                self._numbers.setdefault(name, []).append(value)
                continue
            is_tensor = isinstance(value, Tensor)
            key, digest = ((name, value.shape, value.dtype), _digest(value)) if is_tensor else (name, value)
            if self._digests.setdefault(key, digest) != digest:
                found.append(name)
        if not self._left:
            found += [name for name, values in self._numbers.items() if _is_carried(values)]
        if not found:
            return
        self._left = 0
        names = sorted({name.split(_WITHIN)[0] for name in found})
        if warn:
            _log.warning(
                "%s of the model %s changes with every batch and is neither a parameter nor a buffer: it "
                "goes from one batch to the next of the same worker only, so if forward reads it, the "
                "weights depend on the number of workers, and no checkpoint holds it; start every batch "
                "from the same state, or make it a buffer (register_buffer)",
                ", ".join(names[:5]) + (" ..." if len(names) > 5 else ""),
                type(self._module).__name__,
            )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield tensors without a gradient, numbers and the states of generators (as text) that modules keep in
    themselves, with their paths."""
    for path, child in module.named_modules():
        for name, value in list(vars(child).items()):
            if name not in _OF_TORCH:
                yield from _values(f"{path}.{name}" if path else name, value, _DEEP)


def _values(name: str, value: Any, deep: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and value.device.type != "meta"
        if plain and not value.requires_grad and not isinstance(value, nn.Parameter):
            yield name, value
    elif type(value) in (int, float):
        yield name, float(value)
    elif (state := _generator_state(value)) is not None:
        yield name, state
    elif deep and isinstance(value, list | tuple | deque | dict):
        items = value if isinstance(value, dict) else dict(enumerate(value))
        numbers = [float(item) for item in items.values() if type(item) in (int, float)]
        yield f"{name}{_WITHIN}length", float(len(items))
        yield f"{name}{_WITHIN}sum", sum(numbers)
        for key, item in islice(items.items(), _ITEMS):
            if type(item) not in (int, float):
                yield from _values(f"{name}{_WITHIN}{key}", item, deep - 1)
    elif deep and not isinstance(value, nn.Module | type) and hasattr(value, "__dict__"):
        for key, item in list(vars(value).items()):
            yield from _values(f"{name}.{key}", item, deep - 1)


def _generator_state(value: Any) -> str | None:
    """Return where a generator of random numbers stands: drawn from, it stands elsewhere."""
    if isinstance(value, torch.Generator):
        return _digest(value.get_state())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return repr(value.getstate())
    return None


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    return xxhash.xxh3_128_hexdigest(plain.view(torch.uint8).numpy().data if plain.numel() else b"")


def _is_carried(values: list[float]) -> bool:
    """Return whether these values are carried state: a count grows by the same amount with every batch, a sum
    or an average is another fraction after every one; a whole number that follows a batch's shape does
    neither."""
    if len(values) != _LOOKS:
        return False
    steps = {after - before for before, after in pairwise(values)}
    counts = len(steps) == 1 and steps != {0.0}
    return counts or (len(set(values)) == _LOOKS and not all(value.is_integer() for value in values))
