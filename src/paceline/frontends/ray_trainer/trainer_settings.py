"""The dict of settings of a RayTrainer: which keys are the training's, which the run's, which the model's.

Values come from search spaces too, so NumPy's numbers are numbers here. Imports neither torch nor Ray.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

from paceline.core.errors import ConfigError
from paceline.engines.ray.ray_engine import Ray
from paceline.train.settings.train_config import TrainConfig

_OTHERWISE: Final = {
    "workers": "give num_workers: how many workers train",
    "global_batch": "give batch_size: the samples of one step, of all workers together",
    "engine": "give it to the trainer: RayTrainer(..., engine=paceline.Ray(...))",
}
"""Settings of `TrainConfig` that are said in another way here."""
_RUN: Final = frozenset(
    field.name for field in dataclasses.fields(TrainConfig) if field.name not in (*_OTHERWISE, "epochs")
)


@final
@dataclass(frozen=True)
class TrainerSettings:
    """What a RayTrainer's dict says. `run`: settings of `TrainConfig`; all keys, also those that mean nothing
    here, are the model's to read."""

    lr: float = 1e-3
    weight_decay: float | None = None
    batch_size: int | None = None
    epochs: int | None = None
    num_workers: int = 1
    cpus_per_worker: float = 1.0
    use_gpu: bool = False
    address: str | None = None
    run: Mapping[str, Any] = field(default_factory=dict)

    def engine(self) -> Ray:
        """Return the engine of `num_workers` workers, one per agent, wherever Ray has room."""
        return Ray(
            address=self.address,
            nodes=self.num_workers,
            gpus_per_node=int(self.use_gpu),
            cpus_per_worker=self.cpus_per_worker,
            share_nodes=True,
        )


def read(config: Mapping[str, Any]) -> TrainerSettings:
    """Return the settings of a dict."""
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config is {type(config).__name__}",
            remedy='pass a dict such as {"lr": 1e-3, "batch_size": 64, "epochs": 3}',
        )
    for name, remedy in _OTHERWISE.items():
        if name in config:
            raise ConfigError(f"config has {name}, which RayTrainer does not read", remedy=remedy, key=name)
    for one, other in (("lr", "learning_rate"), ("epochs", "num_epochs")):
        if one in config and other in config and config[one] != config[other]:
            raise ConfigError(
                f"config has {one}={config[one]!r} and {other}={config[other]!r}",
                remedy="give one of the two",
                key=one,
            )
    run = {name: value for name, value in config.items() if name in _RUN}
    address = config.get("address")
    return TrainerSettings(
        lr=_number(config, ("lr", "learning_rate"), 1e-3),
        weight_decay=_number(config, ("weight_decay",), None, at_least=0.0),
        batch_size=_count(config, ("batch_size",), None),
        epochs=_count(config, ("epochs", "num_epochs"), None if "max_steps" in run else 1),
        num_workers=_count(config, ("num_workers",), 1),
        cpus_per_worker=_number(config, ("cpus_per_worker",), 1.0),
        use_gpu=bool(config.get("use_gpu", False)),
        address=None if address is None else str(address),
        run=run,
    )


def _given(config: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    return next(((name, config[name]) for name in names if name in config), (names[0], None))


def _count(config: Mapping[str, Any], names: tuple[str, ...], usual: Any) -> Any:
    name, value = _given(config, names)
    if value is None:
        return usual
    # Of NumPy too; True is a number to Python, and a mistake here.
    if type(value) is bool or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise ConfigError(f"config[{name!r}] is {value!r}", remedy="give a whole number, 1 or more", key=name)
    return int(value)


def _number(config: Mapping[str, Any], names: tuple[str, ...], usual: Any, at_least: float = 1e-300) -> Any:
    name, value = _given(config, names)
    if value is None:
        return usual
    is_number = type(value) is not bool and isinstance(value, numbers.Real)
    number = float(value) if is_number else math.nan
    if not at_least <= number < math.inf:
        remedy = "give a number" + (" that is more than 0" if at_least else ", 0 or more")
        raise ConfigError(f"config[{name!r}] is {value!r}", remedy=remedy, key=name)
    return number
