"""Three runs with one result: undisturbed; with workers that are killed; stopped halfway and resumed on
another number of workers.

    python examples/resume_and_chaos.py
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

import torch
from torch import nn

import paceline
from image_files import digits


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))


def fit(config: paceline.TrainConfig) -> paceline.History:
    trainer = paceline.Trainer(
        net,
        nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2),
        config=config,
    )
    return trainer.fit(digits()[0])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = paceline.TrainConfig(workers=2, global_batch=64, epochs=6, progress=False)

        def at(name: str, **given: Any) -> paceline.TrainConfig:
            return dataclasses.replace(config, run_dir=f"{folder}/{name}", **given)

        undisturbed = fit(at("undisturbed"))
        chaos = paceline.FaultTolerance(chaos="kill rank=1 step=20; kill rank=0 step=60")
        disturbed = fit(at("disturbed", fault_tolerance=chaos))
        fit(at("stopped", max_steps=50))
        resumed = fit(at("stopped", workers=3, resume="auto"))
    hashes = {"undisturbed": undisturbed, "two workers killed": disturbed, "stopped, resumed on 3": resumed}
    for name, history in hashes.items():
        print(f"{name:<24} {history.state_hash}")
    assert len({history.state_hash for history in hashes.values()}) == 1
    print("the same bits")


if __name__ == "__main__":
    main()
