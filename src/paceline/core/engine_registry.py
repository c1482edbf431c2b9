"""Engines by their names, for the command line and for files of settings; below the folders that know what an
engine does.

    from_plain({"name": "ssh", "hosts": ["node1", "node2"]})

Another package may add one: an entry point of the group `paceline.engines`, named as the engine is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import typing
from collections.abc import Mapping
from typing import Any, Final, Protocol, runtime_checkable

from paceline.core import config as core_config
from paceline.core.errors import ConfigError
from paceline.core.wording import listed


@runtime_checkable
class EngineSettings(Protocol):
    """What the settings of every engine say, a frozen dataclass each. `name` is its first field,
    `name: Literal["ssh"] = "ssh"`: files of settings tell engines apart by it."""

    @property
    def name(self) -> str:
        """The engine's name on the command line."""
        ...

    @property
    def nodes(self) -> int:
        """Agents to begin with."""
        ...

    @property
    def workers_per_node(self) -> int: ...


ENTRY_POINTS: Final = "paceline.engines"
_CLASSES: Final = {
    "ray": "paceline.engines.ray.ray_engine:Ray",
    "slurm": "paceline.engines.slurm.slurm_engine:Slurm",
    "kubernetes": "paceline.engines.kubernetes.kubernetes_engine:Kubernetes",
    "mpi": "paceline.engines.mpi.mpi_engine:Mpi",
    "ssh": "paceline.engines.ssh.ssh_engine:Ssh",
}
NAMES: Final = tuple(_CLASSES)


def engine_class(name: str) -> type[EngineSettings]:
    """Return the class of an engine's settings."""
    target = _CLASSES.get(name)
    if target is None:
        found = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
        target = next((point.value for point in found), None)
    if target is None:
        import difflib

        near = difflib.get_close_matches(name.lower(), NAMES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"there is no engine {name!r}",
            remedy=f"{hint}the engines are {listed(NAMES)}; without one a run stays on this machine",
            key="engine",
        )
    module, _, attribute = target.partition(":")
    return typing.cast(type[EngineSettings], getattr(importlib.import_module(module), attribute))


def from_plain(settings: Mapping[str, Any] | str) -> EngineSettings:
    """Return an engine from its name, or from a table with its `name` and settings."""
    table = {"name": settings} if isinstance(settings, str) else dict(settings)
    name = table.get("name")
    if not isinstance(name, str):
        raise ConfigError(
            "the table of an engine has no name",
            remedy=f'add name = "ssh", or another of {listed(NAMES)}',
            key="engine",
        )
    return core_config.load(engine_class(name), table)
