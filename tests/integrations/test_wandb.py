"""Weights & Biases, offline: what it wrote is read back with its own reader."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.train import small_run

import paceline

wandb = pytest.importorskip("wandb")

_BLOCK, _WHOLE, _LAST = 32768, 1, 4

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log: blocks of 32 KiB, records in pieces."""
    offset, record = 7, b""
    while offset + 7 <= len(data):
        left = _BLOCK - offset % _BLOCK
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        record += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


def rows(folder: Path) -> list[dict[str, Any]]:
    """The history of the one offline run below a folder."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            found.append({one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in items})
    return found


@pytest.mark.leaky("wandb keeps its own process until the program ends")
def test_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracker = paceline.WeightsAndBiases("digits", every=1, flush_seconds=200)
    try:
        history = small_run.fit(small_run.settings(tmp_path / "run", epochs=2), [tracker])
        assert (tracker.dropped, tracker.failed) == (0, 0)
        assert (tmp_path / "run" / "wandb-run.json").exists()
    finally:
        wandb.teardown()
    written = rows(tmp_path / "run")
    losses = [(row["step"], row["train/loss"]) for row in written if "train/loss" in row]
    assert losses == [(one.step, one.loss) for one in history.steps]
    times = [(row["train/comm_time"], row["train/data_time"]) for row in written if "train/loss" in row]
    assert times == [(one.comm_time, one.data_time) for one in history.steps]
    assert [row["validation/loss"] for row in written if "validation/loss" in row] == [
        one.loss for one in history.evaluations
    ]
    assert "run/speedup_estimate" in written[-1]
