"""Settings as dataclasses: read from TOML, JSON and YAML files and `key=value` overrides, written as TOML.

Later sources win, key by key. Every source is checked by itself before they are merged, so that an error can
name the file, the key, what was expected and what was given. Must not know what any setting means.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, Union, final

from paceline.core import config_files, typed
from paceline.core.errors import ConfigError, UsageError
from paceline.core.toml_writer import dumps

__all__ = ["dumps", "load"]

T = TypeVar("T")
Source = str | os.PathLike[str] | Mapping[str, Any]


def load(cls: type[T], *sources: Source, overrides: Iterable[str] = ()) -> T:
    """A `cls` from files or mappings, the later winning, then from overrides such as `optimizer.lr=0.1`.

    An override's value is read as TOML, and as a plain string where that does not fit; `none` is None.
    """
    if not dataclasses.is_dataclass(cls):
        raise UsageError(f"{cls!r} is not a dataclass", remedy="describe the settings with @dataclass")
    table = _Table(cls, {})
    for source in sources:
        if isinstance(source, Mapping):
            origin, data = "given settings", dict(source)
        else:
            origin, data = os.fspath(source), config_files.read(source)
        table = _merge(table, _partial_at(data, cls, origin))
    for override in overrides:
        table = _merge(table, _partial_at(_parse_override(override), cls, f"--set {override}"))
    origins = [str(s) for s in sources if not isinstance(s, Mapping)]
    with _Explain(", ".join(origins) or "the settings"):
        result = _build(table, "")
    return typing.cast(T, result)


@dataclass(frozen=True)
class _Table:
    """Some of the fields of a dataclass, already converted."""

    cls: type
    given: dict[str, Any]


@dataclass(frozen=True)
class _Text:
    """An override's value: text whose type is decided by the field it lands on."""

    text: str


@final
class _Explain:
    """Turns what `typed` raises into a ConfigError that says where the value came from."""

    def __init__(self, origin: str) -> None:
        self._origin = origin

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            raise ConfigError(
                f"{self._origin}: {error.message}", remedy=error.remedy, **error.facts
            ) from None
        if isinstance(error, typed.MismatchError):
            key = error.path or "the settings"
            raise ConfigError(
                f"{self._origin}: {key}: expected {error.expected}, given {error.given}",
                remedy=f"change {key} to {error.expected}",
                origin=self._origin,
                key=error.path,
            ) from None
        if isinstance(error, typed.UnknownKeyError):
            key = typed.join(error.path, error.key)
            near = difflib.get_close_matches(error.key, error.valid, n=1, cutoff=0.5)
            remedy = f"did you mean {typed.join(error.path, near[0])}? " if near else ""
            where = f"below {error.path}" if error.path else "here"
            raise ConfigError(
                f"{self._origin}: unknown key {key}",
                remedy=f"{remedy}valid {where}: {', '.join(error.valid)}",
                origin=self._origin,
                key=key,
            ) from None
        if isinstance(error, typed.MissingKeyError):
            raise ConfigError(
                f"{self._origin}: {error.path} is missing and has no default",
                remedy=f"set {error.path} ({error.expected}) in the file or with --set {error.path}=...",
                origin=self._origin,
                key=error.path,
            ) from None


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise ConfigError(
            f"--set {override}: not of the form key=value", remedy="write it like optimizer.lr=0.1"
        )
    data: Any = _Text(text.strip())
    for part in reversed(parts):
        data = {part: data}
    return typing.cast(dict[str, Any], data)


def _partial_at(data: object, cls: type, origin: str) -> _Table:
    with _Explain(origin):
        return _partial_table(data, cls, "")


def _partial_table(data: object, cls: type, path: str) -> _Table:
    if not isinstance(data, Mapping):
        raise typed.MismatchError(path, typed.describe(cls), _shown(data))
    known = typed.fields_of(cls)
    given: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            raise typed.UnknownKeyError(path, str(key), list(known))
        given[key] = _partial(value, known[key][1], typed.join(path, key))
    return _Table(cls, given)


def _partial(value: object, hint: Any, path: str) -> Any:
    nested = _nested(hint)
    if nested is not None and isinstance(value, Mapping):
        return _partial_table(value, nested, path)
    if isinstance(value, _Text):
        return _from_text(value.text, hint, path)
    if isinstance(value, Mapping):
        value = _settle(value)
    return typed.convert(value, hint, path)


def _nested(hint: Any) -> type | None:
    """The one dataclass that a table at this place can be, if there is one."""
    hint = typed.plain_hint(hint)
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    members = [typed.plain_hint(member) for member in (typing.get_args(hint) if is_union else (hint,))]
    tables = [member for member in members if dataclasses.is_dataclass(member)]
    return typing.cast(type, tables[0]) if len(tables) == 1 else None


def _settle(value: object) -> Any:
    """Override text below a free-form dict: there is no field to decide its type, TOML does."""
    if isinstance(value, Mapping):
        return {key: _settle(item) for key, item in value.items()}
    if isinstance(value, _Text):
        parsed = _toml_value(value.text)
        return value.text if parsed is None else parsed
    return value


def _from_text(text: str, hint: Any, path: str) -> Any:
    parsed = _toml_value(text)
    candidates: list[object] = [] if parsed is None else [parsed]
    if text.lower() in ("true", "false"):
        candidates.append(text.lower() == "true")
    if text.lower() in ("none", "null"):
        candidates.insert(0, None)
    candidates.append(text)
    for candidate in candidates:
        try:
            return typed.convert(candidate, hint, path)
        except typed.MismatchError:
            continue
    raise typed.MismatchError(path, typed.describe(hint), repr(text))


def _toml_value(text: str) -> Any:
    # A newline would let one override smuggle in other keys.
    if "\n" in text:
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None


def _shown(value: object) -> str:
    return repr(value.text) if isinstance(value, _Text) else typed.show(value)


def _merge(old: _Table, new: _Table) -> _Table:
    merged = dict(old.given)
    for key, value in new.given.items():
        before = merged.get(key)
        if isinstance(before, _Table) and isinstance(value, _Table):
            merged[key] = _merge(before, value)
        elif isinstance(before, dict) and isinstance(value, dict):
            merged[key] = {**before, **value}
        else:
            merged[key] = value
    return _Table(old.cls, merged)


def _build(table: _Table, path: str) -> Any:
    given = {
        name: _build(value, typed.join(path, name)) if isinstance(value, _Table) else value
        for name, value in table.given.items()
    }
    for name, (field, hint) in typed.fields_of(table.cls).items():
        if name in given:
            continue
        # A nested table whose fields all have defaults need not be mentioned to exist.
        if typed.is_required(field):
            nested = _nested(hint)
            if nested is None or typed.plain_hint(hint) is not nested:
                raise typed.MissingKeyError(typed.join(path, name), typed.describe(hint))
            given[name] = _build(_Table(nested, {}), typed.join(path, name))
    return typed.construct(table.cls, given, path)
