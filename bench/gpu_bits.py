"""The same bits from 1, 2 and 4 processes that share one GPU, with deterministic kernels.

The three models of `same_bits` for an epoch, and the GPT of 124 million parameters in bf16 for some steps,
plain and compiled. Needs one CUDA device.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

import paceline
from bench.gpu import need_cuda
from bench.report import Report, Target, main
from bench.train import bits, gpt_loop
from bench.train.bits import CASES
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

WORKERS = (1, 2, 4)
SHARDS = 4
GPT_BATCH = 16
GPT_STEPS = 10
# One short batch at the end of each epoch of eight steps.
GPT_SEQUENCES = 7 * GPT_BATCH + 3


@dataclass
class Row:
    """Hashes of one model by number of processes, and samples a second."""

    title: str
    hashes: dict[int, str] = field(default_factory=dict)
    speeds: dict[int, float] = field(default_factory=dict)


def measure_case(name: str, folder: Path) -> Row:
    row = Row(CASES[name].title)
    for workers in WORKERS:
        history = bits.fit(
            CASES[name],
            workers=workers,
            run_dir=str(folder / f"{name}-{workers}"),
            device="cuda",
            epochs=1,
            shards=SHARDS,
            micro_batch=bits.MICRO_BATCH,
        )
        row.hashes[workers] = history.state_hash
        row.speeds[workers] = history.samples_per_second
    return row


def measure_gpt(compiled: bool, folder: Path) -> Row:
    row = Row(f"GPT of 124 M parameters, bf16, clipping{', compiled' if compiled else ''}")
    for workers in WORKERS:
        config = TrainConfig(
            workers=workers,
            shards=SHARDS,
            global_batch=GPT_BATCH,
            max_steps=GPT_STEPS,
            seed=gpt_loop.SEED,
            precision="bf16",
            compile=compiled,
            clip_norm=gpt_loop.CLIP_NORM,
            device="cuda",
            threads=1,
            progress=False,
            checkpoint=CheckpointConfig(enabled=False),
            run_dir=str(folder / f"gpt-{compiled}-{workers}"),
        )
        trainer = paceline.Trainer(
            gpt_loop.model(), gpt_loop.objective, optimizer=gpt_loop.optimizer, config=config
        )
        history = trainer.fit(gpt_loop.tokens(GPT_SEQUENCES))
        row.hashes[workers] = history.state_hash
        row.speeds[workers] = history.samples_per_second
    return row


def run() -> Report:
    """state_hash from 1, 2 and 4 processes on one GPU."""
    need_cuda()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        rows = [measure_case(case, folder) for case in CASES]
        rows += [measure_gpt(compiled, folder) for compiled in (False, True)]
    report = Report(
        "gpu_bits",
        f"state_hash on one {torch.cuda.get_device_name()}, {SHARDS} shards, torch {torch.__version__}",
        ("model", *(f"{workers} process{'es' if workers > 1 else ''}" for workers in WORKERS), "samples/s"),
        data={"hashes": {row.title: row.hashes for row in rows}},
    )
    for row in rows:
        speeds = ", ".join(f"{row.speeds[workers]:.0f}" for workers in WORKERS)
        report.rows.append((row.title, *(text[:12] for text in row.hashes.values()), speeds))
        count = len(set(row.hashes.values()))
        what = f"{row.title}: different hashes of {len(row.hashes)} runs"
        report.targets.append(Target(what, count, 1, at_least=False, unit=""))
    return report


if __name__ == "__main__":
    main(run)
