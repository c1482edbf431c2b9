"""The state that is not tensors, as JSON that comes back as what it was: types, order, every bit of a float.

JSON has no tuples, no bytes, no NaN and only text as keys; each of these is written as an object with one key
that begins with "$":

    {"$tuple": [...]}  {"$bytes": "base64"}  {"$float": "nan"}  {"$dict": [[key, value], ...]}

Anything else (a tensor, an object of some class) is refused with its place, never pickled.
"""

from __future__ import annotations

import base64
import json
import math
from typing import Any

from paceline.core.errors import UsageError

_DEEPEST = 200


def encode(state: dict[str, Any]) -> bytes:
    """Return the state's bytes; UsageError names the first value that cannot be kept."""
    if type(state) is not dict:
        raise UsageError(f"a state is a dict, not a {type(state).__name__}", remedy="wrap it in a dict")
    return json.dumps(_plain(state, "state", 0), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def decode(raw: bytes) -> dict[str, Any]:
    """Return the state that `encode` was given; ValueError when the bytes are something else."""
    try:
        state = _restored(json.loads(raw))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"not a state: {error}") from error
    if type(state) is not dict:
        raise ValueError("not a state: it is not a dict")
    return state


def _plain(value: Any, place: str, depth: int) -> Any:
    if value is None or type(value) in (bool, str):
        return value
    if depth > _DEEPEST:
        raise UsageError(
            f"{place[:80]}... is nested more than {_DEEPEST} levels deep",
            remedy="keep the state flat, and free of references to itself",
        )
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if type(value) is list:
        return [_plain(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_plain(item, f"{place}[{index}]", depth + 1) for index, item in enumerate(value)]}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _plain(item, f"{place}[{key!r}]", depth + 1) for key, item in value.items()}
        pairs = [
            [_plain(key, f"{place}'s key {key!r}", depth + 1), _plain(item, f"{place}[{key!r}]", depth + 1)]
            for key, item in value.items()
        ]
        return {"$dict": pairs}
    raise UsageError(
        f"{place} is of type {type(value).__module__}.{type(value).__qualname__}, which a checkpoint's state "
        "cannot hold",
        remedy="use None, bool, int, float, str, bytes, list, tuple, dict; tensors have files of their own",
    )


def _restored(value: Any) -> Any:
    if type(value) is list:
        return [_restored(item) for item in value]
    if type(value) is not dict:
        return value
    if len(value) == 1:
        (kind, inner), *_ = value.items()
        if kind == "$tuple":
            return tuple(_restored(item) for item in inner)
        if kind == "$bytes":
            return base64.b64decode(inner, validate=True)
        if kind == "$float":
            return float(inner)
        if kind == "$dict":
            return {_restored(key): _restored(item) for key, item in inner}
    return {key: _restored(item) for key, item in value.items()}
