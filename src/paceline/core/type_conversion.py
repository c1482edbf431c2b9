"""Convert plain data (of JSON, TOML and YAML) to annotated types, with the path to whatever does not fit; and
numbers that JSON lacks, both ways.

Configuration, events and what commands print as JSON share these rules.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from paceline.core.errors import ConfigError, UsageError
from paceline.core.wording import counted

_NOT_FINITE = {"nan": "nan", "inf": "inf", "infinity": "inf", "-inf": "-inf", "-infinity": "-inf"}


class ConversionError(Exception):
    """A value that does not fit its annotation; caught by the module that knows where the value came from."""

    def __init__(self, key: str, message: str, remedy: str) -> None:
        super().__init__(message)
        self.key = key
        self.message = message
        self.remedy = remedy

    def with_origin(self, origin: str) -> ConfigError:
        """Return the error to show to the user, who gave the value in `origin`."""
        message = f"{origin}: {self.message}"
        return ConfigError(message, remedy=self.remedy, origin=origin, key=self.key)


class MismatchError(ConversionError):
    """A value of another type or range."""

    def __init__(self, path: str, expected: str, given: str) -> None:
        key = path or "the settings"
        super().__init__(path, f"{key}: expected {expected}, given {given}", f"change {key} to {expected}")


def unknown_key(path: str, key: object, valid: Sequence[str], cls: type | None = None) -> ConversionError:
    """Return the error for a key that the type does not have; `valid` are those it has. A class may know what
    is meant: its `__explain_key__` returns the remedy for a name, or an empty text."""
    import difflib

    full = join(path, str(key))
    if answer := getattr(cls, "__explain_key__", lambda name: "")(str(key)):
        return ConversionError(full, f"unknown key {full}", answer)
    near = difflib.get_close_matches(str(key), valid, n=1, cutoff=0.5)
    hint = f"did you mean {join(path, near[0])}? " if near else ""
    where = f"below {path}" if path else "here"
    return ConversionError(full, f"unknown key {full}", f"{hint}valid {where}: {', '.join(valid)}")


def missing_key(path: str, hint: Any, how: str = "") -> ConversionError:
    """Return the error for a key without a default that was not given; `how` it can be given."""
    return ConversionError(
        path, f"{path} is missing and has no default", f"set {path} ({describe(hint)}){how}"
    )


def convert(value: object, hint: Any, path: str) -> Any:
    """Return `value` as `hint`; ConversionError where it does not fit."""
    hint = plain_hint(hint)
    if hint in (Any, object):
        return value
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, typing.get_args(hint), hint, path)
    if origin is Literal:
        for choice in typing.get_args(hint):
            if value == choice and type(value) is type(choice):
                return value
        raise _mismatch(value, hint, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _convert_dataclass(value, hint, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _convert_enum(value, hint, path)
    container = _CONTAINERS.get(origin or hint)
    if container is not None:
        return container(value, hint, typing.get_args(hint), path)
    return _convert_scalar(value, hint, path)


def is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def plain_hint(hint: Any) -> Any:
    """Return the annotation without `Annotated`, `NewType` and the like around it."""
    while True:
        if typing.get_origin(hint) in (Annotated, typing.Final, typing.ClassVar):
            hint = typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        else:
            return hint


def describe(hint: Any) -> str:
    """Return an annotation the way an error message should name it."""
    hint = plain_hint(hint)
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint in (None, type(None)):
        return "none"
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(repr(member.value) for member in hint)
    if dataclasses.is_dataclass(hint):
        return f"a table of {', '.join(fields_of(typing.cast(type, hint)))}"
    if origin is not None:
        inner = ", ".join("..." if arg is ... else describe(arg) for arg in args)
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    return getattr(hint, "__name__", str(hint))


def show(value: object) -> str:
    """Return a value the way an error message should show it: short, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def fields_of(cls: type) -> Mapping[str, tuple[dataclasses.Field[Any], Any]]:
    """Return the fields that may be given to `cls`, with their resolved annotations."""
    return _fields(cls)


@functools.lru_cache(maxsize=256)
def _fields(cls: type) -> Mapping[str, tuple[dataclasses.Field[Any], Any]]:
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise UsageError(
            f"the annotations of {cls.__qualname__} cannot be resolved: {error}",
            remedy="define the classes it refers to at module level",
        ) from error
    fields = {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls) if field.init}
    return types.MappingProxyType(fields)


@functools.lru_cache(maxsize=256)
def _exact(cls: type) -> Mapping[str, frozenset[type]]:
    """Return by field the types whose values need no conversion: journals hold millions of plain numbers."""

    def of(hint: Any) -> frozenset[type]:
        hint = plain_hint(hint)
        if typing.get_origin(hint) in (Union, types.UnionType):
            return frozenset().union(*map(of, typing.get_args(hint)))
        return frozenset({hint} & {bool, int, float, str, type(None)})

    return {name: of(hint) for name, (_, hint) in fields_of(cls).items()}


def _mismatch(value: object, hint: Any, path: str) -> MismatchError:
    return MismatchError(path, describe(hint), show(value))


def _convert_union(value: object, members: tuple[Any, ...], hint: Any, path: str) -> Any:
    if value is None and type(None) in members:
        return None
    # A value that already is of a member's type is never converted to another member's.
    for member in members:
        if isinstance(plain := plain_hint(member), type) and type(value) is plain:
            return value
    for member in members:
        if member is type(None):
            continue
        try:
            return convert(value, member, path)
        except ConversionError:
            tables = [arg for arg in members if dataclasses.is_dataclass(plain_hint(arg))]
            # With one possible table the error inside it is clearer than "not a table".
            if len(tables) == 1 and tables[0] is member and isinstance(value, Mapping):
                raise
    # TOML cannot write None.
    if value == "none" and type(None) in members:
        return None
    raise _mismatch(value, hint, path)


def _convert_dataclass(value: object, cls: type, path: str) -> Any:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise _mismatch(value, cls, path)
    known = fields_of(cls)
    for key in value:
        if key not in known:
            raise unknown_key(path, key, list(known), cls)
    given: dict[str, Any] = {}
    exact = _exact(cls)
    for name, (field, hint) in known.items():
        if name in value and type(value[name]) in exact[name]:
            given[name] = value[name]
        elif name in value:
            given[name] = convert(value[name], hint, join(path, name))
        elif is_required(field):
            raise missing_key(join(path, name), hint)
    return construct(cls, given, path)


def construct(cls: type, given: dict[str, Any], path: str) -> Any:
    """Return `cls(**given)`; a ValueError of the class's checks counts as a mismatch of the whole table."""
    try:
        return cls(**given)
    except ConfigError:
        # Its message and remedy are better than any that could be made here.
        raise
    except ValueError as error:
        raise MismatchError(path, f"a valid {cls.__name__}", f"values for which: {error}") from error


def _convert_enum(value: object, hint: type[Enum], path: str) -> Enum:
    if isinstance(value, hint):
        return value
    for member in hint:
        if type(value) is type(member.value) and value == member.value:
            return member
    if isinstance(value, str) and value in hint.__members__:
        return hint.__members__[value]
    raise _mismatch(value, hint, path)


def _convert_scalar(value: object, hint: Any, path: str) -> Any:
    if hint is None or hint is type(None):
        if value is None:
            return None
    elif hint is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, str) and value.lower() in _NOT_FINITE:
            return float(_NOT_FINITE[value.lower()])
    elif hint is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        # 1e6 is how people write a million, and a float to every file format.
        if isinstance(value, float) and value.is_integer():
            return int(value)
    elif hint is Path:
        if isinstance(value, str | Path):
            return Path(value)
    elif isinstance(hint, type):
        if isinstance(value, hint):
            return value
    else:
        raise UsageError(
            f"{path} is annotated as {hint}, which cannot be read from a file",
            remedy="use int, float, bool, str, Path, Literal, Enum, list, tuple, set, dict or a dataclass",
        )
    raise _mismatch(value, hint, path)


def _convert_list(value: Any, hint: Any, args: tuple[Any, ...], path: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _mismatch(value, hint, path)
    inner = args[0] if args else Any
    return [convert(item, inner, f"{path}[{index}]") for index, item in enumerate(value)]


def _convert_tuple(value: Any, hint: Any, args: tuple[Any, ...], path: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _mismatch(value, hint, path)
    if not args or args[-1] is ...:
        return tuple(_convert_list(value, hint, args[:1], path))
    if len(value) != len(args):
        expected = f"{describe(hint)} of {counted(len(args), 'item')}"
        raise MismatchError(path, expected, counted(len(value), "item"))
    return tuple(
        convert(item, arg, f"{path}[{index}]")
        for index, (item, arg) in enumerate(zip(value, args, strict=True))
    )


def _convert_set(value: Any, hint: Any, args: tuple[Any, ...], path: str) -> set[Any] | frozenset[Any]:
    items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    kind = frozenset if (typing.get_origin(hint) or hint) is frozenset else set
    return kind(_convert_list(items, hint, args, path))


def _convert_dict(value: Any, hint: Any, args: tuple[Any, ...], path: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _mismatch(value, hint, path)
    key_hint, value_hint = args or (Any, Any)
    return {
        _convert_key(key, key_hint, path): convert(item, value_hint, join(path, str(key)))
        for key, item in value.items()
    }


def _convert_key(key: object, hint: Any, path: str) -> Any:
    # JSON and TOML have no keys but strings.
    if plain_hint(hint) is int and isinstance(key, str):
        try:
            return int(key)
        except ValueError:
            raise MismatchError(path, "keys that are int", show(key)) from None
    return convert(key, hint, f"{path} (key {key!r})")


_CONTAINERS: dict[Any, Callable[[Any, Any, tuple[Any, ...], str], Any]] = {
    list: _convert_list,
    Sequence: _convert_list,
    tuple: _convert_tuple,
    set: _convert_set,
    frozenset: _convert_set,
    dict: _convert_dict,
    Mapping: _convert_dict,
}


def finite(value: Any) -> Any:
    """Return plain data with NaN and infinities, which JSON lacks, as strings that `float` understands."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
