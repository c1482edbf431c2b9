"""Run scripts under process-wide overrides: config values, the recorded command, a replacement of `fit`.

`paceline train script.py --workers 8` runs a script that does not know of it: every `Trainer.fit` applies the
overrides in force in its process. Scripts may train in any thread, so they are not bound to one. Imports no
torch.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tomllib
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

from paceline.core import config as core_config, type_conversion
from paceline.core.engine_registry import EngineSettings
from paceline.core.errors import ConfigError
from paceline.engines.local import script_main
from paceline.train.settings.train_config import TrainConfig


@final
@dataclass(frozen=True)
class Command:
    """Command of this process: a script, its arguments, the folder it was started in, and its overrides."""

    script: str
    arguments: tuple[str, ...]
    folder: str
    settings: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "arguments": [*self.arguments], "settings": [*self.settings]}


PER_GPU = "per_gpu."
"""In front of an assignment to a setting of DistributedConfig."""


@final
@dataclass(frozen=True)
class Overrides:
    """Settings and hooks that win over a script.

    file          a TOML, JSON or YAML file of settings
    options       settings by name, which win over the file's
    assignments   texts such as `checkpoint.keep_last=5`, which win over options; `per_gpu.learning_rate=0.1`
                  is for PyTorchDDPTrainer
    command       what the run is recorded as
    replaces_fit  called with (trainer, training data, validation data) by every `Trainer.fit`, instead of
                  training; its result is what `fit` returns. For `paceline replay` and `verify`
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    assignments: tuple[str, ...] = ()
    command: Command | None = None
    replaces_fit: Callable[[Any, Any, Any], Any] | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        self.assigned_by_file()
        for name in [*self.options, *(text.partition("=")[0].strip() for text in self._global)]:
            _check_name(name)

    def __bool__(self) -> bool:
        return bool(self.options or self.assignments or self.file is not None)

    def assigned_by_file(self) -> tuple[str, ...]:
        """Return the file's settings as assignments, as they are recorded; the file may change later."""
        if self.file is None:
            return ()
        return core_config.assignments(TrainConfig, self.file)

    @property
    def _global(self) -> tuple[str, ...]:
        return tuple(text for text in self.assignments if not text.startswith(PER_GPU))

    def per_gpu(self) -> tuple[str, ...]:
        """Return the assignments for a PyTorchDDPTrainer, whose caller uses them."""
        texts = [text.removeprefix(PER_GPU) for text in self.assignments if text.startswith(PER_GPU)]
        if texts and self is _in_force.overrides:
            _in_force.per_gpu_applied = True
        return tuple(texts)

    @property
    def workers(self) -> int | None:
        """The number of workers that wins over a script's: as it is set, or as the engine has them that is
        set; None: the script decides."""
        texts = (*self.assigned_by_file(), *self._global)
        named = {*self.options, *(text.partition("=")[0].strip() for text in texts)}
        wins = "workers" in named or self.engine is not None
        return self.apply(TrainConfig()).workers if wins else None

    @property
    def engine(self) -> EngineSettings | None:
        """The engine that wins over a script's; None: the script decides. Reading it is no use of it."""
        found = self._merged(TrainConfig()).engine if self else None
        return found if isinstance(found, EngineSettings) else None

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Return the config with these settings in place of its own."""
        if not self:
            return config
        _in_force.applied = _in_force.applied or self is _in_force.overrides
        return self._merged(config)

    def _merged(self, config: TrainConfig) -> TrainConfig:
        tables, given = self._replaced(config), dict[str, Any]()
        for name, value in self.options.items():
            table = given
            *above, last = name.split(".")
            for part in above:
                table = table.setdefault(part, {})
            table[last] = value
        files = [] if self.file is None else [self.file]
        return core_config.load(TrainConfig, tables, *files, given, overrides=self._global)

    def with_final(self, settings: Mapping[str, Any]) -> Overrides:
        """Return the same with settings in place of all that is said here about these names."""

        def stays(name: str) -> bool:
            return name.partition("=")[0].strip().partition(".")[0] not in settings

        options = {name: value for name, value in self.options.items() if stays(name)}
        texts = tuple(text for text in self.assignments if stays(text))
        return dataclasses.replace(self, options={**options, **settings}, assignments=texts)

    def _replaced(self, config: TrainConfig) -> dict[str, Any]:
        """Return a config as tables, without the engine in place of which another one is chosen here, and
        without the workers in place of which an engine says how many there are."""
        tables = _as_tables(config)
        engines = [
            _engine_name(text)
            for text in (*self.assigned_by_file(), *self._global)
            if text.partition("=")[0].strip() == "engine"
        ]
        if engines and engines[-1].lower() not in ("none", "null"):
            if any(name not in ("", getattr(config.engine, "name", None)) for name in engines):
                tables["engine"] = None
            tables["workers"] = TrainConfig.workers
        return tables


@final
class _InForce:
    overrides: Overrides = Overrides()
    applied: bool = False
    per_gpu_applied: bool = False


_in_force = _InForce()


def current() -> Overrides:
    """Return the overrides in force in this process; empty by default."""
    return _in_force.overrides


def applied() -> bool:
    """Return whether any config was changed by the overrides in force."""
    return _in_force.applied


def per_gpu_applied() -> bool:
    """Return whether a PyTorchDDPTrainer took the assignments for it among the overrides in force."""
    return _in_force.per_gpu_applied


@contextmanager
def in_force(overrides: Overrides) -> Iterator[None]:
    """Apply these overrides to every `Trainer.fit` inside."""
    before = (_in_force.overrides, _in_force.applied, _in_force.per_gpu_applied)
    _in_force.overrides, _in_force.applied, _in_force.per_gpu_applied = overrides, False, False
    try:
        yield
    finally:
        _in_force.overrides, _in_force.applied, _in_force.per_gpu_applied = before


def command() -> Command | None:
    """Return what this process runs, also as `python script.py`; None in a notebook or a shell."""
    if _in_force.overrides.command is not None:
        return _in_force.overrides.command
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not os.path.isfile(file) or getattr(sys.modules["__main__"], "__spec__", None):
        return None
    return Command(os.path.abspath(file), tuple(sys.argv[1:]), os.getcwd())


def run_script(path: str, arguments: Sequence[str] = ()) -> None:
    """Run a user's script in this process as if Python had started it: as `__main__`, with its arguments and
    its folder first on the path, all of it restored afterwards. What it raises, SystemExit too, is raised."""
    with script_main.running_as_main(path, arguments) as (code, module):
        exec(code, module.__dict__)


def traceback_of_script(error: BaseException, path: str) -> str:
    """Return the traceback of what a script raised in `run_script`, as Python would print it: from the
    script's own first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != os.path.abspath(path):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _engine_name(assignment: str) -> str:
    """Return the name in `engine=slurm` or `engine={name="slurm", nodes=2}`; empty for a table without."""
    value = assignment.partition("=")[2].strip()
    try:
        plain = tomllib.loads(f"engine = {value}")["engine"]
    except tomllib.TOMLDecodeError:
        plain = value
    return str(plain.get("name", "") if isinstance(plain, dict) else plain)


def _as_tables(settings: object) -> dict[str, Any]:
    """Return nested settings as tables, so that a single field of them can be replaced."""
    return {
        name: _as_tables(value) if dataclasses.is_dataclass(value) else value
        for name in type_conversion.fields_of(type(settings))
        for value in [getattr(settings, name)]
    }


def _check_name(name: str) -> None:
    """Refuse an unknown name before the script starts, and list the valid ones."""
    cls: type | None = TrainConfig
    path = ""
    for part in name.split("."):
        if cls is None:
            raise ConfigError(
                f"there is no setting {name}: {path} has no fields", remedy=f"set {path} itself", key=name
            )
        known = type_conversion.fields_of(cls)
        if part not in known:
            remedy = type_conversion.unknown_key(path, part, list(known), cls).remedy
            raise ConfigError(f"there is no setting {name}", remedy=remedy, key=name)
        path, hint = type_conversion.join(path, part), known[part][1]
        members = map(type_conversion.plain_hint, (hint, *typing.get_args(hint)))
        cls = next((one for one in members if isinstance(one, type) and dataclasses.is_dataclass(one)), None)
