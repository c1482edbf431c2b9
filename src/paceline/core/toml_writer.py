"""Dataclasses as TOML text that `config.load` reads back to an equal object.

Must not know any particular setting.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.core import typed
from paceline.core.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(settings: object) -> str:
    """TOML for a dataclass instance, nested dataclasses as tables.

    TOML has no None: a None that is the default is left out, another is written as "none".
    """
    if not dataclasses.is_dataclass(settings) or isinstance(settings, type):
        raise ConfigError(
            f"{typed.show(settings)} is not a dataclass instance", remedy="dump the settings object"
        )
    lines: list[str] = []
    _table(_items(settings, ""), "", lines)
    return "\n".join(lines).lstrip("\n") + "\n" if lines else ""


def _table(items: dict[str, Any], path: str, lines: list[str]) -> None:
    tables = {name: value for name, value in items.items() if _is_table(value)}
    lines += [f"{_key(name)} = {_value(value, path)}" for name, value in items.items() if name not in tables]
    for name, value in tables.items():
        below = typed.join(path, _key(name))
        lines += ["", f"[{below}]"]
        _table(_items(value, below), below, lines)


def _is_table(value: object) -> bool:
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or isinstance(value, Mapping)


def _items(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(_plain(key)): item for key, item in value.items()}
    items: dict[str, Any] = {}
    for name, (field, hint) in typed.fields_of(type(value)).items():
        item = getattr(value, name)
        if item is not None:
            items[name] = item
        elif field.default is not None:
            items[name] = _none(hint, typed.join(path, name))
    return items


def _none(hint: Any, path: str) -> str:
    if typed.convert("none", hint, path) is not None:
        raise ConfigError(
            f"{path} is None, which TOML cannot write where a string is allowed",
            remedy=f"give {path} a default of None",
        )
    return "none"


def _value(value: object, path: str) -> str:
    value = _plain(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        return repr(value) if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, int):
        return str(value)
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
        f"{typed.show(value)} below {path or 'the settings'} cannot be written as TOML",
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
