"""One GPU: a GPT of 124 million parameters against a hand-written loop, and exact against fast mode.

bf16, torch.compile, fused AdamW, clipping, batch 32 x 1024. The loops take turns; the clock of a block starts
and stops with the device idle. The loop is also written by hand with torch's deterministic kernels, so that
what they cost can be told from what Paceline costs. Compilation falls into the steps that do not count. Needs
one CUDA device.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import paceline
from bench.report import Report, Target, main
from bench.train import gpt_loop
from bench.train.paceline_loop import DeviceClock
from bench.train.turns import Peer
from paceline.core.errors import UnavailableError
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig

WARMUP = 15
STEPS = 60
ROUNDS = 3
WANTED = 0.99
TOKENS = gpt_loop.BATCH * gpt_loop.CONTEXT
BY_HAND = "by hand"
BY_HAND_DETERMINISTIC = "by hand, deterministic kernels"
EXACT = "exact"
FAST = "fast"
# Settings that ask for the same work, so that each pair differs in the mode alone.
PACELINE: dict[str, dict[str, Any]] = {
    EXACT: {"mode": "exact"},
    FAST: {"mode": "fast"},
    "exact, 4 shards": {"mode": "exact", "shards": 4},
    "fast, 4 micro batches": {"mode": "fast", "micro_batch": gpt_loop.BATCH // 4},
}


def need_cuda() -> None:
    if not torch.cuda.is_available():
        raise UnavailableError(
            "there is no CUDA device here", remedy="run this benchmark on a machine with one"
        )


def seconds_a_step(settings: dict[str, Any]) -> float:
    """Of Paceline's Trainer on one worker."""
    passes = settings.get("shards", 1) * gpt_loop.BATCH // settings.get("micro_batch", gpt_loop.BATCH)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        # One step more than is measured: the block ends when that one begins.
        clock = DeviceClock(Path(folder, "clock.json"), WARMUP * passes, (WARMUP + STEPS) * passes)
        trainer = paceline.Trainer(
            gpt_loop.model(),
            gpt_loop.objective,
            optimizer=gpt_loop.optimizer,
            config=_config(WARMUP + STEPS + 1, Path(folder, "run"), settings),
            callbacks=[clock],
        )
        trainer.fit(gpt_loop.tokens())
        return float(json.loads(clock.path.read_text())) / STEPS


def _config(steps: int, run_dir: Path, settings: dict[str, Any]) -> TrainConfig:
    return TrainConfig(
        workers=1,
        global_batch=gpt_loop.BATCH,
        max_steps=steps,
        seed=gpt_loop.SEED,
        precision="bf16",
        compile=True,
        clip_norm=gpt_loop.CLIP_NORM,
        device="cuda",
        threads=1,
        checkpoint=CheckpointConfig(enabled=False),
        progress=False,
        run_dir=str(run_dir),
        **{"shards": 1, **settings},
    )


def run() -> Report:
    """A GPT of 124 M parameters on one GPU."""
    need_cuda()
    times: dict[str, list[float]] = {name: [] for name in (BY_HAND, BY_HAND_DETERMINISTIC, *PACELINE)}
    with (
        Peer("bench.train.gpt_loop", {}, workers=1) as peer,
        Peer("bench.train.gpt_loop", {"deterministic": True}, workers=1) as deterministic,
    ):
        contenders: dict[str, Callable[[], float]] = {
            BY_HAND: partial(peer.seconds_a_step, WARMUP, STEPS),
            BY_HAND_DETERMINISTIC: partial(deterministic.seconds_a_step, WARMUP, STEPS),
            **{name: partial(seconds_a_step, settings) for name, settings in PACELINE.items()},
        }
        for _ in range(ROUNDS):
            for name, contender in contenders.items():
                times[name].append(contender())
                print(f"{name}: {times[name][-1] * 1e3:.2f} ms a step", file=sys.stderr, flush=True)
    report = Report(
        "gpu",
        f"GPT of 124 M parameters, batch {gpt_loop.BATCH} x {gpt_loop.CONTEXT}, bf16, compiled, "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        ("loop", "ms a step", "tokens/s", "of the hand-written loop"),
        notes=[f"medians of {ROUNDS} rounds of {STEPS} steps; Paceline on one worker"],
        data={"seconds": times},
    )
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        report.rows.append(
            (name, f"{middle * 1e3:.2f}", f"{TOKENS / middle:,.0f}", f"{ratio(times, BY_HAND, name):.3f}")
        )
    report.targets += [
        Target("fast, of a hand-written loop", ratio(times, BY_HAND, FAST), WANTED),
        Target(
            "exact, of one with deterministic kernels", ratio(times, BY_HAND_DETERMINISTIC, EXACT), WANTED
        ),
    ]
    for slow, quick in ((EXACT, FAST), ("exact, 4 shards", "fast, 4 micro batches")):
        cost = (1 / ratio(times, quick, slow) - 1) * 100
        report.notes.append(f"cost of {slow} against {quick}: {cost:+.1f} % time")
    return report


def ratio(times: dict[str, list[float]], peer: str, name: str) -> float:
    """How fast `name` is in terms of `peer`, round by round."""
    pairs = zip(times[peer], times[name], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


if __name__ == "__main__":
    main(run)
