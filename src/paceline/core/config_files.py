"""TOML, JSON and YAML files as plain data, with errors that name the file and the line.

A key that stands twice is an error in all three. Must not know which keys are meaningful.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError

# YAML 1.1, which PyYAML speaks, takes 1e-3 for a string.
_YAML_FLOAT = re.compile(r"[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$")


def read(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file, by its suffix: .toml, .json, .yaml or .yml."""
    path = Path(source)
    parser = _PARSERS.get(path.suffix.lower())
    if parser is None:
        raise ConfigError(
            f"{path}: the suffix {path.suffix!r} is not one of {', '.join(_PARSERS)}",
            remedy="name the file after its format",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}", remedy="save it as UTF-8") from error
    data = parser(path, text)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: the file holds a {type(data).__name__}, not a table of settings",
            remedy="begin the file with keys",
        )
    return data


def _toml(path: Path, text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not(path, "TOML", str(error)) from error


def _json(path: Path, text: str) -> object:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table: dict[str, object] = {}
        for key, value in pairs:
            if key in table:
                raise _not(path, "JSON", f"the key {key!r} stands twice in one object")
            table[key] = value
        return table

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise _not(path, "JSON", str(error)) from error


def _yaml(path: Path, text: str) -> object:
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[object] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise _not(
                        path, "YAML", f"the key {key!r} stands twice, line {key_node.start_mark.line + 1}"
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _YAML_FLOAT, list("-+0123456789"))
    try:
        data = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise _not(path, "YAML", str(error)) from error
    return {} if data is None else data


def _not(path: Path, language: str, why: str) -> ConfigError:
    return ConfigError(f"{path} is not valid {language}: {why}", remedy="correct the file at the place named")


_PARSERS = {".toml": _toml, ".json": _json, ".yaml": _yaml, ".yml": _yaml}
