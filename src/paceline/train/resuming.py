"""What has to hold before a run goes on: ranks that start alike, a checkpoint that belongs to it.

Must not know how state is put back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.checkpoint.reading import Checkpoint
from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.comm.handover import receive_state, send_state
from paceline.core import journal
from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.core.events import StepCommitted
from paceline.train import fingerprint
from paceline.train.config import TrainConfig, changes_of_definition, definition
from paceline.train.history import StepRecord
from paceline.train.state import quick_hash

_log = logging.getLogger(__name__)

FORMAT = 1


def check_alike(
    context: DistributedContext,
    config: TrainConfig,
    arithmetic: Mapping[str, str],
    module: nn.Module,
    *,
    fresh: bool = True,
) -> None:
    """Ranks that would compute other bits than the first are refused before the first step. One that is not
    `fresh` has trained before and goes back to a checkpoint: its weights say nothing."""
    if context.world_size == 1:
        return
    told = context.all_gather([dict(arithmetic), quick_hash(module) if fresh else None])
    if config.mode == "exact":
        for rank, (theirs, _) in enumerate(told):
            fingerprint.check(told[0][0], theirs, f"rank {rank}")
    known = [digest for _, digest in told if digest is not None]
    odd = [rank for rank, (_, digest) in enumerate(told) if digest is not None and digest != known[0]]
    if odd:
        raise UsageError(
            f"the model of rank {', '.join(map(str, odd))} does not start with the weights of rank 0's",
            remedy="seed before the model is built (torch.manual_seed), or load the same weights everywhere",
        )


@dataclass(frozen=True)
class Saved:
    """A version as it goes into a run; `run` is the mark of the run that wrote it."""

    version: int
    run: str
    state: dict[str, Any]
    tensors: dict[str, Tensor]


def fetch(
    context: DistributedContext,
    store: CheckpointStore,
    which: str | int,
    before: int = -1,
    readers: Sequence[int] | None = None,
) -> Saved | None:
    """The version to go on from: the first of `readers` looks for it, the others open the same one, and who
    does not see the place gets it from the first. `before` >= 0: the newest of at most that step."""
    readers = range(context.world_size) if readers is None else readers
    first = readers[0] if readers else 0
    found = _find(store, which, before) if readers and context.rank == first else None
    version = context.broadcast(None if found is None else found.version, first)
    if version is None:
        return None
    others = [rank for rank in range(context.world_size) if rank not in readers]
    if context.rank in others:
        tensors, state = receive_state(context, first)
        return Saved(int(version), state["run"], state["state"], tensors)
    checkpoint = store.open(int(version)) if found is None else found
    saved = Saved(
        checkpoint.version, checkpoint.manifest.info.run, checkpoint.state, dict(checkpoint.tensors())
    )
    if context.rank == first:
        send_state(context, others, saved.tensors, {"run": saved.run, "state": saved.state})
    return saved


def _find(store: CheckpointStore, which: str | int, before: int) -> Checkpoint | None:
    if before < 0 and which != "auto":
        return store.open(which)
    return store.newest_good(at_most_step=before if before >= 0 else None)


def discard_after(store: CheckpointStore, step: int) -> None:
    """Removes what was saved after `step`: it may hold what a broken worker has spoiled, and nobody may ever
    go on from it."""
    for manifest in store.manifests():
        if manifest.info.step > step:
            _log.warning("version %d of step %d is removed", manifest.version, manifest.info.step)
            store.discard(manifest.version)


def check_same_run(found: Saved, config: TrainConfig, samples: int | None) -> None:
    """A checkpoint of another format, of other settings or of other data is refused, with the difference."""
    saved, version = found.state, found.version
    if saved.get("format") != FORMAT:
        raise UnavailableError(
            f"version {version} has format {saved.get('format')}, and not {FORMAT}",
            remedy="resume with the Paceline that wrote it, or begin anew from its weights "
            "(paceline checkpoint export)",
        )
    before, now = dict(saved["definition"]), definition(config)
    if config.mode == "fast" and before.get("mode") == "fast":
        # There a shard is a worker, and workers come and go.
        before["shards"] = now["shards"] = None
    changes = changes_of_definition(before, now)
    if saved["data"]["size"] != samples:
        changes.append(f"samples: {saved['data']['size']} -> {samples}")
    if changes:
        raise ConfigError(
            f"version {version} belongs to another run than this one: {'; '.join(changes)}",
            remedy="resume with the settings and the data of the run, or begin anew from its weights "
            "(paceline checkpoint export)",
        )


def earlier_steps(file: Path, before: int) -> list[StepRecord]:
    """The steps up to `before` that the journal knows; of one that was done again the last time counts."""
    found: dict[int, StepRecord] = {}
    for event in journal.iterate(file):
        if isinstance(event, StepCommitted) and event.step <= before:
            found[event.step] = StepRecord.of(event)
    return [found[step] for step in sorted(found)]
