"""The engine among the settings of a run: an object, a name, or a table of a file. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.engines import registry
from paceline.engines.engine import Engine
from paceline.train.settings.value_checks import refuse

if TYPE_CHECKING:
    from paceline.train.settings.train_config import TrainConfig


def choose_engine(config: TrainConfig) -> None:
    """Make an engine of what was given, and the workers those of its nodes."""
    given: object = config.engine
    if isinstance(given, str | Mapping):
        object.__setattr__(config, "engine", registry.from_plain(given))
    engine = config.engine
    if not isinstance(engine, Engine):
        return
    workers = engine.nodes * engine.workers_per_node
    if config.workers not in (1, workers):
        refuse(
            config,
            "workers",
            f"workers={config.workers} on {engine.name}, whose {engine.nodes} nodes with "
            f"{engine.workers_per_node} workers each are {workers}",
            "leave workers out: nodes and workers_per_node of the engine say how many there are",
        )
    object.__setattr__(config, "workers", workers)
    if not config.fault_tolerance.enabled:
        refuse(
            config,
            "engine",
            f"engine={engine.name} with fault_tolerance.enabled=False: workers on other machines have a "
            "supervisor",
            "set fault_tolerance.enabled=True, or leave the engine out",
        )
