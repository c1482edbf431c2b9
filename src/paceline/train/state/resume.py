"""Check, before a run starts or continues, that the ranks start alike and that a checkpoint belongs to the
run; and fetch the checkpoint. Putting the state back is `RunState.load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.comm.state_transfer import receive_state, send_state
from paceline.core import events, journal
from paceline.core.errors import ConfigError, UnavailableError, UsageError
from paceline.core.wording import ranks
from paceline.train import host_fingerprint
from paceline.train.history import StepRecord
from paceline.train.settings.train_config import TrainConfig, changes_of_definition, definition
from paceline.train.state.model_state import quick_hash

FORMAT = 1


def check_same_start(
    context: DistributedContext,
    config: TrainConfig,
    arithmetic: Mapping[str, str],
    module: nn.Module,
    *,
    fresh: bool = True,
) -> None:
    """Refuse ranks that would compute other bits than the first, before the first step. The weights of a rank
    that is not `fresh` do not count: it has trained before and goes back to a checkpoint."""
    if context.world_size == 1:
        return
    gathered = context.all_gather([dict(arithmetic), quick_hash(module) if fresh else None])
    if config.mode == "exact":
        for rank, (theirs, _) in zip(context.labels, gathered, strict=True):
            host_fingerprint.check(gathered[0][0], theirs, f"rank {rank}")
    known = [(rank, one) for rank, (_, one) in zip(context.labels, gathered, strict=True) if one is not None]
    odd = [rank for rank, digest in known if digest != known[0][1]]
    if odd:
        raise UsageError(
            f"the model of {ranks(odd)} does not start with the weights of rank {known[0][0]}'s",
            remedy="seed before the model is built (torch.manual_seed), or load the same weights everywhere",
        )


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A version that was read; `run` is the id of the run that wrote it."""

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
) -> LoadedCheckpoint | None:
    """Load the version to resume from: the first of `readers` chooses it, the other readers open the same
    one, and ranks that do not see the store get it from the first. `before` >= 0: the newest of at most that
    step."""
    readers = range(context.world_size) if readers is None else readers
    first = readers[0] if readers else 0
    found = None
    if readers and context.rank == first:
        newest = before >= 0 or which == "auto"
        at_most = before if before >= 0 else None
        found = store.newest_good(at_most_step=at_most) if newest else store.open(which)
    version = context.broadcast(None if found is None else found.version, first)
    if version is None:
        return None
    others = [rank for rank in range(context.world_size) if rank not in readers]
    if context.rank in others:
        tensors, state = receive_state(context, first)
        return LoadedCheckpoint(int(version), state["run"], state["state"], tensors)
    checkpoint = store.open(int(version)) if found is None else found
    saved = LoadedCheckpoint(
        checkpoint.version, checkpoint.manifest.info.run, checkpoint.state, dict(checkpoint.tensors())
    )
    if context.rank == first:
        send_state(context, others, saved.tensors, {"run": saved.run, "state": saved.state})
    return saved


def check_same_run(found: LoadedCheckpoint, config: TrainConfig, samples: int | None) -> None:
    """Refuse a checkpoint of another format, of other settings or of other data, and name the difference."""
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
    """Return the steps up to `before` that the journal knows; of a repeated step the last record counts."""
    steps = (event for event in journal.iterate(file) if isinstance(event, events.StepCommitted))
    found = {event.step: StepRecord.of(event) for event in steps if event.step <= before}
    return [found[step] for step in sorted(found)]


def journaled(file: Path) -> int:
    """Return the last step of the journal that counts."""
    last = 0
    for event in journal.last_events(file):
        if isinstance(event, events.StepCommitted | events.RunResumed):
            last = event.step
        elif isinstance(event, events.RunStarted):
            last = 0
    return last
