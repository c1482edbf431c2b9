"""Batches as trees: tensors inside tuples, named tuples, lists and dicts, nested as deeply as the user likes.

`map_leaves` rebuilds a tree with every tensor replaced. `packed` and `unpacked` carry a tree through a wire
that knows plain containers only; what cannot travel is refused before, so that one worker accepts no more
than many.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from torch import Tensor

from paceline.core.errors import UsageError

# Begins what stands for a container that the wire has no word for.
_NAMED: Final = "paceline.named_tuple"
_TUPLE: Final = "paceline.tuple"

_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, bytearray, np.ndarray, set, frozenset)


def map_leaves(data: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    """Apply `tensor` to every tensor and rebuild the containers. Anything that is no tensor is first shown to
    `other`: what it returns instead of the same object is taken as it is."""
    if isinstance(data, Tensor):
        return tensor(data)
    own = other(data)
    if own is not data:
        return own
    if isinstance(data, dict):
        return _rebuilt(data, {key: map_leaves(value, tensor, other) for key, value in data.items()})
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_leaves(value, tensor, other) for value in data))
    if isinstance(data, list | tuple):
        return _rebuilt(data, [map_leaves(value, tensor, other) for value in data])
    return data


def plain(data: Any) -> Any:
    """Return `data` with subclasses of dict, list and tuple replaced by the plain kind."""
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        parts = [plain(value) for value in data]
        return parts if isinstance(data, list) else tuple(parts)
    return data


def packed(data: Any, what: str = "batch") -> Any:
    """Return `data` as the wire takes it; `unpacked` gives an equal tree back, with its named tuples."""
    kind = type(data)
    if isinstance(data, Tensor) or kind in _PLAIN or isinstance(data, np.generic):
        return data
    if kind is dict:
        return {key: packed(value, f"{what}[{key!r}]") for key, value in data.items()}
    if kind is list:
        return [packed(value, f"{what}[{number}]") for number, value in enumerate(data)]
    if kind is tuple:
        parts = [packed(value, f"{what}[{number}]") for number, value in enumerate(data)]
        # A tuple that happens to begin like a marker is marked itself.
        return (_TUPLE, parts) if parts and parts[0] in (_NAMED, _TUPLE) else tuple(parts)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        names = (kind.__module__, kind.__qualname__)
        if _found(*names) is kind:
            parts = [packed(value, f"{what}.{name}") for name, value in zip(data._fields, data, strict=True)]
            return (_NAMED, *names, parts)
    raise UsageError(
        f"{what} of a stream is of type {kind.__qualname__}, which cannot be sent to several workers, and "
        "one worker does no more than many",
        remedy="let the collate_fn give tensors, or tuples, lists, dicts and named tuples (of classes that a "
        "module has by name) of them",
    )


def unpacked(data: Any) -> Any:
    kind = type(data)
    if kind is dict:
        return {key: unpacked(value) for key, value in data.items()}
    if kind is list:
        return [unpacked(value) for value in data]
    if kind is not tuple:
        return data
    if data and isinstance(data[0], str):
        if data[0] == _TUPLE:
            return tuple(unpacked(value) for value in data[1])
        if data[0] == _NAMED:
            return _made(data[1], data[2], [unpacked(value) for value in data[3]])
    return tuple(unpacked(value) for value in data)


def _made(module: str, name: str, parts: list[Any]) -> Any:
    found = _found(module, name)
    # Only a named tuple is ever made: a name from a message must not call anything else.
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise UsageError(
            f"this rank has no named tuple {module}.{name}, which rank 0 sent",
            remedy="define it at the top of a module that every rank imports",
        )
    return found(*parts)


def _found(module: str, name: str) -> Any:
    place: Any = sys.modules.get(module)
    for part in name.split("."):
        place = getattr(place, part, None)
    return place


def _rebuilt(original: Any, values: Any) -> Any:
    if type(original) in (dict, list):
        return values
    try:
        return type(original)(values)
    except TypeError:
        # A container whose constructor wants something else (a defaultdict): its plain kind serves as well.
        return dict(values) if isinstance(original, dict) else values
