"""The start of a run, from its beginning or from a checkpoint: check that the ranks start alike and that the
checkpoint belongs to the run, fetch it, have `RunState` load it, and note the start in the journal.
"""

from __future__ import annotations

import time
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
from paceline.data.batch_plan import DataPosition
from paceline.train import host_fingerprint
from paceline.train.settings.train_config import TrainConfig, changes_of_definition, definition
from paceline.train.state.duty_progress import Duty
from paceline.train.state.model_state import RESIDUAL, quick_hash
from paceline.train.state.run_state import FORMAT, RunState


def resume(
    state: RunState,
    which: str | int | None,
    before: int = -1,
    *,
    fresh: bool = True,
    store: CheckpointStore | None = None,
) -> None:
    """Start from the beginning or from a checkpoint; a collective call of all ranks.

    `before` >= 0: the newest version of at most that step. `fresh`: this rank still has the weights that its
    model was built with. `store`: another one than the run's own.
    """
    parts, context = state.parts, state.parts.team.context
    check_same_start(context, parts.config, parts.fingerprint, parts.module, fresh=fresh)
    residuals = _load_version(state, which, before, store or parts.store)
    step = state.position.step
    parts.transaction.residuals.load(residuals, step)
    state.run_id = str(context.broadcast(state.run_id))
    state.first_step = step
    if parts.checkpointer is not None:
        parts.checkpointer.begin_from(state.parent, step, state.run_id)
    every = parts.config.evaluate_every
    if state.parent is None or state.ended is not None or every is None:
        return
    if step and step % every == 0 and state.evaluated_step != step:
        state.agenda.add(Duty.EVALUATE)  # it failed, or was cut off, after this step was saved


def _load_version(
    state: RunState, which: str | int | None, before: int, store: CheckpointStore | None
) -> dict[str, Tensor]:
    """Load a version, or begin anew where there is none; return the residuals of its shards."""
    parts = state.parts
    found = None
    if which is not None and store is not None:
        readers = None if parts.checkpointer is None else parts.checkpointer.writers
        found = fetch(parts.team.context, store, which, before, readers)
    if found is None:
        state.begin_at(DataPosition())
        state.parent = state.evaluated_step = None
        return {}
    check_same_run(found, parts.config, parts.samples, parts.order)
    state.load(found.state, found.tensors)
    state.parent, state.run_id = found.version, found.run or state.run_id
    return {
        name.removeprefix(RESIDUAL): tensor
        for name, tensor in found.tensors.items()
        if name.startswith(RESIDUAL)
    }


def note_start(state: RunState, *, disowned: bool = False) -> None:
    """Write the first lines of this start to the journal. Events that a checkpoint holds, because all workers
    were killed before the journal had them, come first."""
    parts, team, recorder = state.parts, state.parts.team, state.parts.recorder
    if state.parent is None:
        recorder.note(
            events.RunStarted(
                time=time.time(),
                workers=team.world_size,
                shards=team.shards,
                samples=parts.samples,
                definition=definition(parts.config, parts.order),
                fingerprint=parts.fingerprint,
                disowned=disowned,
            )
        )
        return
    # Written in order: only the end may be missing. A supervisor drops duplicates by itself.
    recalled = recorder.recall(None if parts.journal_file is None else journaled(parts.journal_file))
    for event in recalled if team.is_master else ():
        recorder.note_here(event)
    recorder.note(
        events.RunResumed(
            time=time.time(),
            version=state.parent,
            step=state.position.step,
            epoch=state.position.epoch,
            workers=team.world_size,
            disowned=disowned,
        )
    )


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
    own = [dict(arithmetic), quick_hash(module) if fresh else None, definition(config)]
    gathered = context.all_gather(own)
    for rank, (_, _, theirs) in zip(context.labels, gathered, strict=True):
        changes = changes_of_definition(gathered[0][2], theirs)
        if changes:
            raise ConfigError(
                f"rank {rank} has other settings than rank {context.labels[0]}: {'; '.join(changes)}",
                remedy="give every rank the same settings",
            )
    if config.mode == "exact":
        for rank, (theirs, _, _) in zip(context.labels, gathered, strict=True):
            host_fingerprint.check(gathered[0][0], theirs, f"rank {rank}")
    known = [
        (rank, one) for rank, (_, one, _) in zip(context.labels, gathered, strict=True) if one is not None
    ]
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


def check_same_run(
    found: LoadedCheckpoint,
    config: TrainConfig,
    samples: int | None,
    order: Mapping[str, Any] | None = None,
) -> None:
    """Refuse a checkpoint of another format, of other settings or of other data, and name the difference."""
    saved, version = found.state, found.version
    if saved.get("format") != FORMAT:
        raise UnavailableError(
            f"version {version} has format {saved.get('format')}, and not {FORMAT}",
            remedy="resume with the Paceline that wrote it, or begin anew from its weights "
            "(paceline checkpoint export)",
        )
    before, now = dict(saved["definition"]), definition(config, order)
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


def journaled(file: Path) -> int:
    """Return the last step of the journal that counts."""
    last = 0
    for event in journal.last_events(file):
        if isinstance(event, events.StepCommitted | events.RunResumed):
            last = event.step
        elif isinstance(event, events.RunStarted):
            last = 0
    return last
