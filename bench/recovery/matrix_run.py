"""Runs of the matrix, one after the other:

    python -m bench.recovery.matrix_run FOLDER CASE [FOLDER CASE ...]

Without a name of a case nothing is done to the run. Each trains a small model on checked shards with a
replica, so that all read the same samples; the end of it, or the error, is in its folder's `outcome.json`.
Must not know how the outcome is judged.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

import paceline
from bench.recovery import matrix_cases
from bench.recovery.matrix_cases import FAULT_STEP, RANK, STEPS, WORKERS, Case
from paceline.core import events, journal
from paceline.train.history import StepRecord
from paceline.train.settings.fault_tolerance import FaultTolerance

SAMPLES = 2048
BATCH = 128
SHARDS = 8
EVERY = 10  # steps between two checkpoints, and between two evaluations
BIND = "PACELINE_MATRIX_BIND"  # the address at which guests from other hosts find the run
_DISK_BYTES = 8 << 20


def main() -> None:
    known = {case.name: case for case in matrix_cases.cases()}
    for folder, name in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        _run(Path(folder), known[name] if name else None)


def _run(folder: Path, case: Case | None) -> None:
    outcome: dict[str, Any] = {"hash": None, "error": None}
    started = time.perf_counter()
    with ExitStack() as stack:
        try:
            outcome["hash"] = train(folder, case, stack)
        except Exception as error:
            traceback.print_exc()
            outcome["error"] = f"{type(error).__name__}: {error!s}".splitlines()[0]
    outcome["seconds"] = time.perf_counter() - started
    file = folder / "outcome.json"
    file.with_suffix(".part").write_text(json.dumps(outcome))
    file.with_suffix(".part").rename(file)


def train(folder: Path, case: Case | None, stack: ExitStack) -> str:
    """The final hash of the run that lies in `folder / "run"`."""
    data = shards(folder, damaged=case is not None and case.tool == "shard")
    url = str(stack.enter_context(_SmallDisk(folder / "disk")).path) if _has(case, "disk") else None
    care = FaultTolerance(chaos=case.chaos or None if case is not None else None)
    workers = WORKERS
    if _has(case, "disk"):
        # Who frees it follows the run through its journal, a quarter of a second behind.
        care = FaultTolerance(chaos="slow rank=all factor=10", stragglers="wait")
    if _has(case, "network"):
        # One seat is left for the guest, who needs seconds to come: all are slow meanwhile.
        workers = RANK
        care = FaultTolerance(chaos="slow rank=all factor=25", stragglers="wait", bind=os.environ[BIND])
    config = paceline.TrainConfig(
        workers=workers,
        shards=SHARDS,
        global_batch=BATCH,
        max_steps=STEPS,
        epochs=None,
        threads=1,
        evaluate_every=EVERY,
        progress=False,
        run_dir=str(folder / "run"),
        checkpoint=paceline.CheckpointConfig(every_steps=EVERY, every_epochs=None, keep_last=2, url=url),
        fault_tolerance=care,
    )
    watching: list[paceline.Observer] = []
    if _has(case, "disk"):
        watching.append(_FillDisk(Path(url or "")))
    if _has(case, "supervisor"):
        watching.append(_KillSupervisor(folder / "run" / "journal.jsonl"))
    trainer = paceline.Trainer(
        build_model,
        objective,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        config=config,
        callbacks=watching,
    )
    return trainer.fit(data, validation()).state_hash


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def objective(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def validation() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(256, 64, generator=generator), torch.randint(10, (256,), generator=generator)


def shards(folder: Path, *, damaged: bool) -> paceline.CheckedShards:
    """The training data on disk, and a copy of it; `damaged` flips bits in the first."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 64, generator=generator).numpy()
    labels = torch.randint(10, (SAMPLES,), generator=generator).tolist()
    samples = [(image, label) for image, label in zip(images, labels, strict=True)]
    for name in ("data", "replica"):
        paceline.write_shards(samples, folder / name)
    if damaged:
        for file in (folder / "data").iterdir():
            content = bytearray(file.read_bytes())
            if file.suffix == ".json" or len(content) < 4096:
                continue
            for offset in range(len(content) // 4, len(content) // 2, 997):
                content[offset] ^= 0x10
            file.write_bytes(content)
    return paceline.CheckedShards(folder / "data", replicas=[folder / "replica"])


def _has(case: Case | None, tool: str) -> bool:
    return case is not None and case.tool == tool


@final
class _SmallDisk:
    """A file system of a few megabytes, for the time of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> _SmallDisk:
        self.path.mkdir()
        options = f"size={_DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "small", str(self.path)], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)


@final
class _FillDisk(paceline.Observer):
    """Takes all that is left of a disk from one step on, and gives it back later."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def on_step(self, record: StepRecord) -> None:
        if record.step == FAULT_STEP - EVERY:
            with self._ballast.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(1 << 16))
                except OSError:
                    return  # full, as it should be
        if record.step == STEPS - 2 * EVERY + 1:
            self._ballast.unlink(missing_ok=True)


@final
class _KillSupervisor(paceline.Observer):
    """kill -9 of the supervisor."""

    def __init__(self, journal_file: Path) -> None:
        self._journal = journal_file

    def on_step(self, record: StepRecord) -> None:
        if record.step == FAULT_STEP:
            chunk = journal.read(self._journal)
            (pid,) = (e.pid for e in chunk.events if isinstance(e, events.SupervisorStarted))
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
