"""Settings as dataclasses: read from TOML, JSON and YAML files and `key=value` overrides; written to files.

Later sources win, key by key. Every source is checked by itself before they are merged, so that an error can
name the file, the key, what was expected and what was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, Union

from paceline.core import atomic_file, type_conversion
from paceline.core.errors import ConfigError, PlatformError, UsageError
from paceline.core.type_conversion import ConversionError, MismatchError, convert, fields_of, join, plain_hint

T = TypeVar("T")
ConfigSource = str | os.PathLike[str] | Mapping[str, Any]

# YAML 1.1, which PyYAML speaks, takes 1e-3 for a string.
_YAML_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def load(cls: type[T], *sources: ConfigSource, overrides: Iterable[str] = ()) -> T:
    """Return a `cls` from files or mappings, the later winning, then from overrides such as
    `optimizer.lr=0.1`.

    An override's value is read as TOML, and as a plain string where that does not fit; `none` is None.
    """
    if not dataclasses.is_dataclass(cls):
        raise UsageError(f"{cls!r} is not a dataclass", remedy="describe the settings with @dataclass")
    table = _Table(cls, {})
    for origin, data in _parsed(sources, overrides):
        with _explained(origin):
            table = _merge(table, _partial_table(data, cls, ""))
    origins = [str(s) for s in sources if not isinstance(s, Mapping)]
    with _explained(", ".join(origins) or "the settings"):
        result = _build(table, "")
    return typing.cast(T, result)


def assignments(cls: type, source: ConfigSource) -> tuple[str, ...]:
    """Return a file or a mapping as overrides such as `optimizer.lr=0.1`, for `load`. A key that `cls` lacks
    and a value of another type are errors; any key may be left out, and what fields have to do with each
    other is checked by `load`."""
    ((origin, data),) = _parsed([source], ())
    with _explained(origin):
        given = [*_flat(_partial_table(data, cls, ""))]
    return tuple(f"{name}={'none' if value is None else _value(value, name)}" for name, value in given)


def _flat(table: _Table, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.given.items():
        if isinstance(value, _Table):
            yield from _flat(value, join(path, name))
        else:
            yield join(path, name), value


@dataclass(frozen=True)
class _Table:
    """Some of the fields of a dataclass, already converted."""

    cls: type
    given: dict[str, Any]


@dataclass(frozen=True)
class _Text:
    """An override's value: text whose type is decided by the field it lands on."""

    text: str


@contextlib.contextmanager
def _explained(origin: str) -> Iterator[None]:
    """Have an error name where the value came from."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error.message}", remedy=error.remedy, **error.facts) from None
    except ConversionError as error:
        raise error.with_origin(origin) from None


def _parsed(
    sources: Iterable[ConfigSource], overrides: Iterable[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return where settings come from, and what they are, one after the other."""
    for source in sources:
        if isinstance(source, Mapping):
            yield "given settings", dict(source)
        else:
            yield os.fspath(source), read(source)
    for override in overrides:
        yield f"--set {override}", _parse_override(override)


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


def _partial_table(data: Mapping[str, Any], cls: type, path: str) -> _Table:
    known = fields_of(cls)
    given: dict[str, Any] = {}
    for key, value in data.items():
        if key not in known:
            raise type_conversion.unknown_key(path, key, list(known), cls)
        given[key] = _partial(value, known[key][1], join(path, key))
    return _Table(cls, given)


def _partial(value: object, hint: Any, path: str) -> Any:
    nested = _nested(hint)
    if nested is not None and isinstance(value, Mapping):
        return _partial_table(value, nested, path)
    if isinstance(value, _Text):
        return _from_text(value.text, hint, path)
    if isinstance(value, Mapping):
        value = _parse_text(value)
    return convert(value, hint, path)


def _nested(hint: Any) -> type | None:
    """Return the one dataclass that a table at this place can be, if there is one."""
    hint = plain_hint(hint)
    is_union = typing.get_origin(hint) in (Union, types.UnionType)
    members = [plain_hint(member) for member in (typing.get_args(hint) if is_union else (hint,))]
    tables = [member for member in members if dataclasses.is_dataclass(member)]
    return typing.cast(type, tables[0]) if len(tables) == 1 else None


def _parse_text(value: object) -> Any:
    """Parse override text in a free-form dict as TOML; no field type is declared there."""
    if isinstance(value, Mapping):
        return {key: _parse_text(item) for key, item in value.items()}
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
            return convert(candidate, hint, path)
        except MismatchError:
            continue
    raise MismatchError(path, type_conversion.describe(hint), repr(text))


def _toml_value(text: str) -> Any:
    # A newline would let one override smuggle in other keys.
    if "\n" in text:
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None


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
        name: _build(value, join(path, name)) if isinstance(value, _Table) else value
        for name, value in table.given.items()
    }
    for name, (field, hint) in fields_of(table.cls).items():
        if name in given:
            continue
        key = join(path, name)
        # A nested table whose fields all have defaults need not be mentioned to exist.
        if type_conversion.is_required(field):
            nested = _nested(hint)
            if nested is None or plain_hint(hint) is not nested:
                raise type_conversion.missing_key(key, hint, f" in the file or with --set {key}=...")
            given[name] = _build(_Table(nested, {}), key)
    return type_conversion.construct(table.cls, given, path)


# files


def read(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a file, by its suffix: .toml, .json, .yaml or .yml. A key that stands twice is an
    error in all three, and errors name the file and the line."""
    path = Path(source)
    language = _language(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}", remedy="save it as UTF-8") from error
    try:
        data = _PARSERS[language](text)
    except ValueError as error:
        raise ConfigError(
            f"{path} is not valid {language}: {error}", remedy="correct the file at the place named"
        ) from error
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: the file holds a {type(data).__name__}, not a table of settings",
            remedy="begin the file with keys",
        )
    return data


def _json(text: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table: dict[str, object] = {}
        for key, value in pairs:
            if key in table:
                raise ValueError(f"the key {key!r} stands twice in one object")
            table[key] = value
        return table

    return json.loads(text, object_pairs_hook=unique)


def _yaml(text: str) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[object] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise ValueError(f"the key {key!r} stands twice, line {key_node.start_mark.line + 1}")
                seen.add(key)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, list("-+0123456789"))
    try:
        data = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return {} if data is None else data


_LANGUAGES = {".toml": "TOML", ".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
_PARSERS: dict[str, Callable[[str], object]] = {"TOML": tomllib.loads, "JSON": _json, "YAML": _yaml}


def _language(path: Path) -> str:
    """Return the language of a file of settings, by its suffix."""
    language = _LANGUAGES.get(path.suffix.lower())
    if language is None:
        raise ConfigError(
            f"{path}: the suffix {path.suffix!r} is not one of {', '.join(_LANGUAGES)}",
            remedy="name the file after its format",
        )
    return language


# writing


def save(settings: object, target: str | os.PathLike[str]) -> Path:
    """Write a dataclass instance to a file that `load` reads back to an equal one: TOML, JSON or YAML, by its
    suffix."""
    path = Path(target)
    text = _WRITERS[_language(path)](settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.replace(path, [text.encode()], durable=False)
    except OSError as error:
        raise PlatformError(
            f"{path} cannot be written: {error.strerror}", remedy="check the folder and its permissions"
        ) from error
    return path


def _yaml_text(settings: object) -> str:
    import yaml

    return str(yaml.safe_dump(tomllib.loads(dumps(settings)), sort_keys=False))


_WRITERS: dict[str, Callable[[object], str]] = {
    "TOML": lambda settings: dumps(settings),
    # What TOML can hold, the others can: through it nothing is written that could not be read back.
    "JSON": lambda settings: json.dumps(tomllib.loads(dumps(settings)), indent=2) + "\n",
    "YAML": _yaml_text,
}


def dumps(settings: object) -> str:
    """Return TOML for a dataclass instance, nested dataclasses as tables.

    TOML has no None: a None that is the default is left out, another is written as "none".
    """
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        raise ConfigError(
            f"{type_conversion.show(settings)} is not a dataclass instance", remedy="dump the settings object"
        )
    lines: list[str] = []
    _table(_items(settings, ""), "", lines)
    return "\n".join(lines).lstrip("\n") + "\n" if lines else ""


def _table(items: dict[str, Any], path: str, lines: list[str]) -> None:
    tables = {name: value for name, value in items.items() if _is_table(value)}
    lines += [f"{_key(name)} = {_value(value, path)}" for name, value in items.items() if name not in tables]
    for name, value in tables.items():
        below = join(path, _key(name))
        lines += ["", f"[{below}]"]
        _table(_items(value, below), below, lines)


def _is_table(value: object) -> bool:
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or isinstance(value, Mapping)


def _items(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(_plain(key)): item for key, item in value.items()}
    items: dict[str, Any] = {}
    for name, (field, hint) in fields_of(type(value)).items():
        item = getattr(value, name)
        if item is not None:
            items[name] = item
        elif field.default is not None:
            items[name] = _none(hint, join(path, name))
    return items


def _none(hint: Any, path: str) -> str:
    if convert("none", hint, path) is not None:
        raise ConfigError(
            f"{path} is None, which TOML cannot write where a string is allowed",
            remedy=f"give {path} a default of None",
        )
    return "none"


def _value(value: object, path: str) -> str:
    value = _plain(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)  # TOML, too, writes nan, inf and -inf
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item, path) for item in value)}]"
    if isinstance(value, set | frozenset):
        return f"[{', '.join(sorted(_value(item, path) for item in value))}]"
    if _is_table(value):
        inner = ", ".join(
            f"{_key(name)} = {_value(item, path)}" for name, item in _items(value, path).items()
        )
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    raise ConfigError(
        f"{type_conversion.show(value)} below {path or 'the settings'} cannot be written as TOML",
        remedy="use plain values, lists, dicts and dataclasses in settings",
    )


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _string(name)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
