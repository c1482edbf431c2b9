"""The engine among the settings of a run: an object, a name, or a table of a file. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core import engine_registry
from paceline.core.engine_registry import EngineSettings
from paceline.core.wording import counted
from paceline.train.settings.value_checks import refuse


def chosen_engine(settings: object, given: object, *, workers: int, supervised: bool) -> object:
    """Return the engine of what was given for `settings`; refuse one that contradicts its other fields."""
    if isinstance(given, type):
        name = (
            f"paceline.{given.__name__}"
            if given.__module__.startswith("paceline.engines.")
            else given.__name__
        )
        message = f"engine is the class {given.__name__}, and not an engine with its settings"
        refuse(settings, "engine", message, f"write engine={name}(...)")
    engine = engine_registry.from_plain(given) if isinstance(given, str | Mapping) else given
    if not isinstance(engine, EngineSettings):
        return engine  # None, or what is refused by its type
    most = workers_of(engine)
    if workers not in (1, most):
        refuse(
            settings,
            "workers",
            f"workers={workers} on {engine.name}, whose {engine.nodes} nodes with "
            f"{engine.workers_per_node} workers each are {most}",
            "leave workers out: nodes and workers_per_node of the engine say how many there are",
        )
    if not supervised:
        refuse(
            settings,
            "engine",
            f"engine={engine.name} with fault_tolerance.enabled=False: workers on other machines have a "
            "supervisor",
            "set fault_tolerance.enabled=True, or leave the engine out",
        )
    return engine


def in_a_comment(engine: object) -> str:
    """Return a line of TOML that says where the workers are; empty for this machine. Of the engine's other
    settings any may be a secret."""
    if not isinstance(engine, EngineSettings):
        return ""
    nodes, each = counted(engine.nodes, "node"), counted(engine.workers_per_node, "worker")
    return f"# engine {engine.name}: {nodes} with {each} each\n"


def workers_of(engine: EngineSettings) -> int:
    """Return how many workers the engine's nodes have."""
    return engine.nodes * engine.workers_per_node
