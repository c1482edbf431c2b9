"""A search space in a TOML file, as `paceline tune --space` reads it.

lr = { loguniform = [1e-4, 1e-1] }
momentum = { uniform = [0.0, 0.99] }
layers = { randint = [1, 5] }
optimizer = ["sgd", "adam"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import ConfigError
from paceline.frontends.tuner import search_space

_KINDS: Final[Mapping[str, Callable[..., Any]]] = {
    "uniform": search_space.uniform,
    "loguniform": search_space.loguniform,
    "randint": search_space.randint,
}
_REMEDY: Final = 'write it like lr = { loguniform = [1e-4, 1e-1] } or optimizer = ["sgd", "adam"]'


def read_space(path: str) -> dict[str, Any]:
    """Return the search space of a file."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the search space {path} cannot be read: {error.strerror}", remedy="give a TOML file"
        ) from None
    except ValueError as error:
        raise ConfigError(f"the search space {path} is not TOML: {error}", remedy=_REMEDY) from None
    if not table:
        raise ConfigError(f"the search space {path} is empty: there is nothing to search", remedy=_REMEDY)
    return {name: _parsed(path, name, value) for name, value in table.items()}


def _parsed(path: str, name: str, value: Any) -> Any:
    if isinstance(value, list):
        return search_space.choice(value)
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError(f"{path}: {name} is {value!r}, which is no distribution", remedy=_REMEDY)
    ((kind, given),) = value.items()
    if kind == "choice":
        return search_space.choice(given)
    if kind not in _KINDS:
        raise ConfigError(
            f"{path}: {name} has the unknown distribution {kind!r}",
            remedy=f"use choice, {', '.join(_KINDS)}",
        )
    if not isinstance(given, list) or len(given) != 2:
        raise ConfigError(
            f"{path}: {name}: {kind} is given {given!r}", remedy="give two numbers, low and high"
        )
    return _KINDS[kind](*given)
