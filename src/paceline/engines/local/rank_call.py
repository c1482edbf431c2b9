"""A function and its arguments on their way to a rank, and a result on its way back.

Functions and classes of `__main__` travel by value. The rank gets a new `__main__` that holds them, so
that ordinary pickle, `torch.save` and type hints find them there.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from paceline.core.errors import UsageError
from paceline.core.wording import type_name
from paceline.engines.local import memfd_pickle


@dataclass(frozen=True)
class RankCall:
    """Call of a rank; `classes` are those that came by value, in an order both sides know."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    classes: tuple[type, ...]


def pack(
    function: Callable[..., Any], args: Sequence[Any], reducers: memfd_pickle.Reducers
) -> tuple[int, RankCall]:
    """Put a call into a memory file; and return it as `unpack` will. UsageError names what cannot travel."""
    # A tuple is written from left to right, so the list is complete by the time its own turn comes.
    definitions: list[object] = []
    sources = _Sources(definitions)
    try:
        descriptor = memfd_pickle.dump(
            (function, tuple(args), definitions, sources), reducers=reducers, definitions=definitions
        )
    except Exception as error:
        raise _blame(function, args, reducers, error) from error
    return descriptor, RankCall(function, tuple(args), _classes(definitions))


def unpack(descriptor: int) -> RankCall:
    """Read a call in a rank and give the rank a `__main__` with the definitions that came along."""
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        function, args, definitions, sources = memfd_pickle.load(descriptor, mapped=True)
    except ImportError as error:
        raise UsageError(
            f"the function or its arguments need a module that a rank cannot import: {error}",
            remedy="put it on sys.path of the process that calls spawn, or send it by value with "
            "cloudpickle.register_pickle_by_value(module)",
        ) from error
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    _fill(main, definitions)
    return RankCall(function, args, _classes(definitions))


def pack_result(result: object, call: RankCall, rank: int, reducers: memfd_pickle.Reducers) -> int:
    """Put a rank's result into a memory file."""
    try:
        return memfd_pickle.dump(result, reducers=reducers, shared=call.classes)
    except Exception as error:
        raise UsageError(
            f"the result of rank {rank}, of type {type_name(type(result))}, cannot travel back: "
            f"{type(error).__name__}: {error}",
            remedy="return plain data, arrays or tensors; do not return open files, sockets, locks or "
            "generators",
            rank=rank,
        ) from error


def unpack_result(descriptor: int, call: RankCall, rank: int) -> Any:
    """Read a rank's result in the parent."""
    try:
        return memfd_pickle.load(descriptor, shared=call.classes)
    except Exception as error:
        raise UsageError(
            f"the result of rank {rank} arrived but cannot be rebuilt here: {type(error).__name__}: {error}",
            remedy="return objects of classes that the calling process can import, or plain data",
            rank=rank,
        ) from error


class _Sources:
    """The text behind definitions that are in no file (notebook cells), so that tracebacks can show lines."""

    def __init__(self, definitions: Sequence[object]) -> None:
        self._definitions = definitions

    def __reduce__(self) -> tuple[Any, ...]:
        found: dict[str, list[str]] = {}
        for definition in self._definitions:
            if isinstance(definition, FunctionType):
                name = definition.__code__.co_filename
                entry = linecache.cache.get(name)
                # An entry without a modification time is not backed by a file.
                if entry is not None and len(entry) == 4 and entry[1] is None:
                    found[name] = list(entry[2])
        return dict, (found,)


def _classes(definitions: Sequence[object]) -> tuple[type, ...]:
    return tuple(one for one in definitions if isinstance(one, type))


def _fill(main: ModuleType, definitions: Sequence[Any]) -> None:
    for one in definitions:
        if one.__module__ != "__main__":
            continue
        if isinstance(one, FunctionType):
            # Not __file__ and the like: multiprocessing would take it as a script to run again.
            for name, value in one.__globals__.items():
                if not name.startswith("__"):
                    main.__dict__.setdefault(name, value)
        if "." not in one.__qualname__:
            setattr(main, one.__name__, one)


def _blame(
    function: Callable[..., Any], args: Sequence[Any], reducers: memfd_pickle.Reducers, error: Exception
) -> UsageError:
    parts: list[tuple[str, object]] = [
        (f"argument {place} of {_name(function)}, of type {type_name(type(value))},", value)
        for place, value in enumerate(args, start=1)
    ]
    parts.append((f"the function {_name(function)} (or a global or closure variable it uses)", function))
    for what, value in parts:
        try:
            descriptor = memfd_pickle.dump(value, reducers=reducers)
        except Exception as found:
            reason, culprit = found, what
            break
        os.close(descriptor)
    else:
        reason, culprit = error, f"the call of {_name(function)} with its arguments"
    return UsageError(
        f"{culprit} cannot be sent to the ranks: {type(reason).__name__}: {reason}",
        remedy="create it inside the function, or pass what it is made from (a path, an address, settings)",
    )


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", None) or type_name(type(function)))
