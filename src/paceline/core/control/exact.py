"""Checks that a message's fields are exactly what its annotations say, compiled once per message class.

Configuration is forgiving (core.typed turns 1e6 into an int and names the path to a mistake); what comes from
a socket is not, and there are hundreds of messages a second. A type alone is not enough: a number that no
run can have, a NaN or a name of a megabyte would reach the deciding machine, the journal and the other
members. So each number has a range (`Range`, else what a float holds exactly), a float is finite, and a name
has a length (`Length`). Must not know the messages.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Union, final

from paceline.core.errors import InternalError

Check = Callable[[Any], Any]

_LARGEST: Final = 1 << 53


@final
@dataclass(frozen=True)
class Range:
    """A number from `least` to `most`, as an annotation; of a str, that its digits are a whole one."""

    least: int
    most: int


@final
@dataclass(frozen=True)
class Length:
    """Text of at most so many characters, as an annotation."""

    most: int


@final
@dataclass(frozen=True)
class Cut:
    """Text that a log or an error will show, as an annotation: cut to `most` characters, not refused. User
    code's exceptions are of any length, and the text goes into other messages, which have a limit too."""

    most: int


class NotExactError(Exception):
    """A value that is not of its annotated type; caught by `messages`."""


def maker(cls: type) -> Callable[[dict[Any, Any]], Any]:
    """A function that makes a `cls` from a dictionary of its fields, or raises NotExactError."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    checks = {field.name: _check(hints[field.name]) for field in fields}
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def make(given: dict[Any, Any]) -> Any:
        if not required <= given.keys():
            raise NotExactError(f"{', '.join(sorted(required - given.keys()))} is missing")
        values = {}
        for name, value in given.items():
            check = checks.get(name)
            if check is None:
                raise NotExactError(f"{str(name)[:40]!r} is not known")
            try:
                values[name] = check(value)
            except NotExactError as error:
                raise NotExactError(f"{name}: {error}") from None
        return cls(**values)

    return make


def _check(hint: Any) -> Check:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is Annotated:
        return _limited(args[0], args[1])
    if origin in (Union, types.UnionType):
        (inner,) = (_check(arg) for arg in args if arg is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _many(_check(args[0])) if args[-1] is ... else _fixed([_check(arg) for arg in args])
    if origin is dict:
        return _mapping(_check(args[0]), _check(args[1]))
    if hint is float:
        return _number
    if hint is int:
        return _whole(Range(-_LARGEST, _LARGEST))
    if hint is str:
        return _text(None)
    if hint in (bool, bytes):
        return _plain(hint)
    raise InternalError(f"a message has a field of type {hint}, which the wire does not check")


def _plain(kind: type) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise NotExactError(f"expected {kind.__name__}, given {type(value).__name__}")
        return value

    return check


def _limited(kind: Any, limit: Any) -> Check:
    if kind is int and isinstance(limit, Range):
        return _whole(limit)
    if kind is float and isinstance(limit, Range):
        return _between(limit)
    if kind is str and isinstance(limit, Range):
        return _digits(limit)
    if kind is str and isinstance(limit, Length):
        return _text(limit.most)
    if kind is str and isinstance(limit, Cut):
        whole, most = _text(None), limit.most
        return lambda value: whole(value)[:most]
    raise InternalError(f"a message limits {kind} by {limit}, which the wire does not check")


def _whole(limit: Range) -> Check:
    least, most = limit.least, limit.most

    def check(value: Any) -> Any:
        # Not isinstance: a bool is no number here.
        if type(value) is not int:
            raise NotExactError(f"expected int, given {type(value).__name__}")
        if not least <= value <= most:
            raise NotExactError(f"expected {least} to {most}, given a number of {value.bit_length()} bits")
        return value

    return check


def _text(most: int | None) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not str:
            raise NotExactError(f"expected str, given {type(value).__name__}")
        if most is not None and len(value) > most:
            raise NotExactError(f"expected at most {most} characters, given {len(value)}")
        return value

    return check


def _digits(limit: Range) -> Check:
    longest = len(str(limit.most))

    def check(value: Any) -> Any:
        if type(value) is not str or not value.isascii() or not value.isdecimal() or len(value) > longest:
            raise NotExactError("expected a whole number as text")
        if not limit.least <= int(value) <= limit.most:
            raise NotExactError(f"expected {limit.least} to {limit.most} as text")
        return value

    return check


def _number(value: Any) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and abs(value) < _LARGEST:
        return float(value)
    raise NotExactError(f"expected a finite float, given {type(value).__name__}")


def _between(limit: Range) -> Check:
    def check(value: Any) -> float:
        number = _number(value)
        if not limit.least <= number <= limit.most:
            raise NotExactError(f"expected {limit.least} to {limit.most}")
        return number

    return check


def _many(inner: Check) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if type(value) is not tuple and type(value) is not list:
            raise NotExactError(f"expected a tuple, given {type(value).__name__}")
        return tuple([inner(item) for item in value])

    return check


def _fixed(inner: list[Check]) -> Check:
    def check(value: Any) -> tuple[Any, ...]:
        if (type(value) is not tuple and type(value) is not list) or len(value) != len(inner):
            raise NotExactError(f"expected {len(inner)} items, given {type(value).__name__}")
        return tuple([one(item) for one, item in zip(inner, value, strict=True)])

    return check


def _mapping(keys: Check, values: Check) -> Check:
    def check(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise NotExactError(f"expected a table, given {type(value).__name__}")
        return {keys(key): values(item) for key, item in value.items()}

    return check
