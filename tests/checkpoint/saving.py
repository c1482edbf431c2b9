"""A small run's checkpoints, whose content is a function of the step: for saving, and for recognising."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint import state_json
from paceline.checkpoint.digests import share_of
from paceline.checkpoint.loader import Checkpoint
from paceline.checkpoint.manifest import MODEL, CheckpointInfo, CheckpointManifest, FileRecord
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.staging_buffer import ImageBuffer
from paceline.checkpoint.store import CheckpointStore
from paceline.checkpoint.writer import BackgroundWriter, WriteResult


def tensors_at(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/weight": torch.randn(7, 5, generator=generator),
        "model/bias": torch.randn(5, generator=generator).to(torch.bfloat16),
        "model/seen": torch.tensor(step),
        "optimizer/0/weight/exp_avg": torch.randn(7, 5, generator=generator, dtype=torch.float64),
        "optimizer/0/weight/step": torch.tensor(float(step)),
    }


def state_at(step: int) -> dict[str, Any]:
    return {"step": step, "position": (1, step), "loss": 1.0 / (step + 3), "scale": float("inf")}


def write_part(
    store: CheckpointStore, version: int, part: int, parts: int, tensors: Mapping[str, Tensor]
) -> FileRecord:
    """Write tensors as one of `parts` files, in this thread."""
    buffer = ImageBuffer()
    layout = buffer.fill(tensors, sorted(tensors))
    buffer.wait()
    record = store.write_image(version, part, parts, buffer.image(layout), len(layout.entries))
    return replace(record, finite=buffer.finite(layout, MODEL))


def write_state(store: CheckpointStore, version: int, state: dict[str, Any]) -> FileRecord:
    """Write what is not a tensor."""
    return store.write_state_bytes(version, state_json.encode(state))


def save(
    store: CheckpointStore,
    step: int,
    *,
    parts: int = 2,
    retention: Retention | None = None,
    parent: int | None = None,
    loss: float | None = None,
) -> CheckpointManifest:
    """Save a step as `parts` writers would, one after the other."""
    version = store.next_version()
    tensors = tensors_at(step)
    records = []
    for part in range(parts):
        share = {name: tensors[name] for name in share_of(tensors, part, parts)}
        records.append(write_part(store, version, part, parts, share))
    records.append(write_state(store, version, state_at(step)))
    metrics = {"loss": 1.0 / (step + 1) if loss is None else loss}
    info = CheckpointInfo(step=step, samples=32 * step, workers=parts, parent=parent, metrics=metrics)
    manifest = store.commit(version, records, info)
    if retention is not None:
        store.prune(retention)
    return manifest


def finished(writer: BackgroundWriter) -> WriteResult:
    """What the writer has under way, when it is done."""
    done = writer.wait(60)
    assert done is not None
    return done


def assert_is(checkpoint: Checkpoint | None, step: int) -> None:
    """All of the checkpoint is that step's: no mixture goes unseen."""
    assert checkpoint is not None
    assert checkpoint.manifest.info.step == step
    assert checkpoint.state == state_at(step)
    expected = tensors_at(step)
    found = checkpoint.tensors()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
