"""What `paceline train` sets of a run whose loop is another framework's.

Settings of the record and of the run's length hold. All others are refused: config.toml would name them, and
they would have no effect.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from paceline.core.available_resources import cores
from paceline.core.errors import ConfigError
from paceline.frontends import overrides
from paceline.train.settings.train_config import TrainConfig

_HELD: Final = frozenset(
    (
        *("epochs", "max_steps", "workers", "clip_norm"),
        *("checkpoint", "run_dir", "run_dir_access", "name", "resume"),
        *("log_every", "progress", "timeout"),
        # Where a supervisor would listen, which these runs do not have: pods set it for every script.
        *(f"fault_tolerance.{name}" for name in ("bind", "port", "token_file")),
    )
)
_PER_GPU: Final = {
    "clip_norm": "gradient_clipping",
    "precision": "mixed_precision",
    "micro_batch": "gradient_accumulation_steps",
}
"""Names of DistributedConfig, by which a trainer says what it has in another way."""
_RATE: Final = "the learning rate is that of the script's optimizer: change it there"
_REMEDIES: Final = {
    "global_batch": "batches are those of the script's data: change them there",
    "micro_batch": "set gradient_accumulation_steps in the DistributedConfig",
    "fault_tolerance": "the framework and its launcher decide what happens to lost workers: leave it out; in "
    "a queue, give the run one number of workers",
    **dict.fromkeys(("schedule", "warmup_steps", "lr_rule", "scheduler_interval", "scheduler_metric"), _RATE),
}


def overridden(made: TrainConfig, framework: str, otherwise: Mapping[str, str]) -> TrainConfig:
    """Return the settings of a run with those of `paceline train` in their place; refuse those without a
    meaning there. `otherwise`: what the trainer has in another way, as `FrameworkSettings.refuse` has it.

    What says no more than holds already is taken: the run's own config.toml, and the size that a queue gives
    to a run of one number of workers.
    """
    chosen = overrides.current().apply(made)
    filled_in = vars(made.resolved(cores()))
    most, care = made.workers, chosen.fault_tolerance
    if (care.min_workers, care.max_workers) == (most, most):
        fixed = dataclasses.replace(made.fault_tolerance, min_workers=most, max_workers=most)
        made = dataclasses.replace(made, fault_tolerance=fixed)
    held = _HELD.difference(name for name, theirs in _PER_GPU.items() if theirs in otherwise)
    for name, value in _changes(made, chosen, held):
        if name in filled_in and value == filled_in[name]:
            continue
        remedy = otherwise.get(_PER_GPU.get(name, ""), _REMEDIES.get(name.partition(".")[0]))
        raise ConfigError(
            f"{name}={value!r} has no meaning under {framework}",
            remedy=remedy or "leave it out: it is a setting of paceline.Trainer",
            key=name,
        )
    return chosen


def _changes(before: Any, after: Any, held: Collection[str], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and new values of settings that differ, but for those of `held`."""
    for field in dataclasses.fields(before):
        name = above + field.name
        old, new = getattr(before, field.name), getattr(after, field.name)
        if name in held or old == new:
            continue
        if dataclasses.is_dataclass(old) and type(old) is type(new):
            yield from _changes(old, new, held, f"{name}.")
        else:
            yield name, new
