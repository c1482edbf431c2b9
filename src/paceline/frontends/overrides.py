"""Settings from outside a script that win over those in it, what was run, and who wants to see a `fit`.

`paceline train script.py --workers 8` runs a script that knows nothing of it: every `Trainer.fit` asks here.
One holder for the process, since scripts may train in any thread. Must not import torch, nor know commands.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, final

from paceline.core import config as core_config, typed
from paceline.core.errors import ConfigError
from paceline.train.config import TrainConfig

Interceptor: TypeAlias = Callable[[Any, Any, Any], Any]
"""(trainer, training data, validation data) -> what `fit` returns."""


@final
@dataclass(frozen=True)
class Command:
    """What this process runs: a script, its arguments, the folder it was started in, and what won over it."""

    script: str
    arguments: tuple[str, ...]
    folder: str
    settings: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "arguments": [*self.arguments], "settings": [*self.settings]}


@final
@dataclass(frozen=True)
class Overrides:
    """`options` are settings by name, `assignments` texts such as `checkpoint.keep_last=5`, which win."""

    options: Mapping[str, Any] = field(default_factory=dict)
    assignments: tuple[str, ...] = ()
    command: Command | None = None

    def __post_init__(self) -> None:
        for name in [*self.options, *(text.partition("=")[0].strip() for text in self.assignments)]:
            _check_name(name)

    def __bool__(self) -> bool:
        return bool(self.options or self.assignments)

    def apply(self, config: TrainConfig) -> TrainConfig:
        """The config with these settings in the place of its own."""
        if not self:
            return config
        given: dict[str, Any] = {}
        for name, value in self.options.items():
            table = given
            *above, last = name.split(".")
            for part in above:
                table = table.setdefault(part, {})
            table[last] = value
        _holder.applied = _holder.applied or self is _holder.overrides
        return core_config.load(TrainConfig, _as_tables(config), given, overrides=self.assignments)


@final
class _Holder:
    overrides: Overrides = Overrides()
    interceptor: Interceptor | None = None
    applied: bool = False


_holder = _Holder()


def current() -> Overrides:
    """What is in force in this process; empty where nobody set anything."""
    return _holder.overrides


def applied() -> bool:
    """Whether any config was changed by what is in force."""
    return _holder.applied


@contextmanager
def in_force(overrides: Overrides) -> Iterator[None]:
    """Every `Trainer.fit` inside takes these settings."""
    before, was_applied = _holder.overrides, _holder.applied
    _holder.overrides, _holder.applied = overrides, False
    try:
        yield
    finally:
        _holder.overrides, _holder.applied = before, was_applied


def command() -> Command | None:
    """What this process runs, also when started as `python script.py`; None in a notebook or a shell."""
    if _holder.overrides.command is not None:
        return _holder.overrides.command
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not os.path.isfile(file) or getattr(sys.modules["__main__"], "__spec__", None):
        return None
    return Command(os.path.abspath(file), tuple(sys.argv[1:]), os.getcwd())


def interceptor() -> Interceptor | None:
    """Who takes the place of training, if anybody does."""
    return _holder.interceptor


@contextmanager
def intercept(callback: Interceptor) -> Iterator[None]:
    """Inside, `Trainer.fit` hands itself and its data to `callback` instead of training."""
    before, _holder.interceptor = _holder.interceptor, callback
    try:
        yield
    finally:
        _holder.interceptor = before


def _as_tables(settings: object) -> dict[str, Any]:
    """Settings within settings as tables, so that one of their fields can be replaced alone."""
    return {
        name: _as_tables(value) if dataclasses.is_dataclass(value) else _as_given(value)
        for name in typed.fields_of(type(settings))
        for value in [getattr(settings, name)]
    }


def _as_given(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, Path) else value


def _check_name(name: str) -> None:
    """Refused before the script starts, and with all that there is at this place."""
    cls: type | None = TrainConfig
    path = ""
    for part in name.split("."):
        known = {} if cls is None else typed.fields_of(cls)
        if part not in known:
            near = difflib.get_close_matches(part, known, n=1, cutoff=0.5)
            hint = f"did you mean {typed.join(path, near[0])}? " if near else ""
            raise ConfigError(
                f"there is no setting {name}" + (f": {path} has no fields" if not known else ""),
                remedy=f"{hint}valid {f'below {path}' if path else 'here'}: {', '.join(known)}"
                if known
                else f"set {path} itself",
                key=name,
            )
        path = typed.join(path, part)
        cls = _table_at(known[part][1])


def _table_at(hint: Any) -> type | None:
    members = [typed.plain_hint(hint), *(typed.plain_hint(one) for one in typing.get_args(hint))]
    return next((one for one in members if isinstance(one, type) and dataclasses.is_dataclass(one)), None)
