"""Settings of a run as trackers keep them, and the identity that a tracker gave a run, for its next start."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from paceline.core.atomic_file import replace_file
from paceline.core.engine_registry import EngineSettings
from paceline.core.untrusted import redact_credentials
from paceline.train.callbacks import RunInfo

_LONGEST = 500  # characters of a value: what the oldest servers take
_OF_ENGINE = ("name", "nodes", "workers_per_node")  # the others may hold secrets


def parameters(run: RunInfo) -> dict[str, str]:
    """Return the settings by dotted name; those that are not set are left out, and so are secrets."""
    found = dict(_flat(run.config, ""))
    found |= {"workers": str(run.workers), "device": run.device}
    if run.samples is not None:
        found["samples"] = str(run.samples)
    return found


def _flat(settings: Any, prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, EngineSettings):
            found += [(f"{prefix}{field.name}.{name}", str(getattr(value, name))) for name in _OF_ENGINE]
        elif dataclasses.is_dataclass(value):
            found += _flat(value, f"{prefix}{field.name}.")
        elif value is not None:
            found.append((f"{prefix}{field.name}", redact_credentials(str(value))[:_LONGEST]))
    return found


def recall_identity(run: RunInfo, file: str) -> str | None:
    """Return the identity of the run that this one resumes, where it has written one."""
    if run.run_dir is None or not run.first_step:
        return None
    try:
        known = json.loads((Path(run.run_dir) / file).read_text(encoding="utf-8"))["id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a run that this tracker has not written yet
    return known if isinstance(known, str) else None


def keep_identity(run: RunInfo, file: str, identity: str) -> None:
    """Write the identity to the run's folder."""
    if run.run_dir is not None:
        replace_file(Path(run.run_dir) / file, json.dumps({"id": identity}).encode())
