"""A fit on two agents, in a process whose RAY_ADDRESS is not set; a program of the tests:

    python -m tests.clusters.ray.local_fits HOW FOLDER

HOW: `own`, a cluster that the fit starts for itself; `users`, one that the user's ray.init() started; `auto`,
the one that runs on this machine. Prints a line of JSON: the hash, and whether Ray is still connected.
"""

from __future__ import annotations

import json
import os
import sys

import ray
import torch
from tests.clusters.ray.small_training import SETTINGS, build, data
from torch import nn

import paceline


def main(how: str, folder: str) -> None:
    assert not os.environ.get("RAY_ADDRESS")
    if how == "users":
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    engine = paceline.Ray(address="auto" if how == "auto" else None, nodes=2)
    trainer = paceline.Trainer(
        lambda: build(SETTINGS),
        nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.05),
        config=paceline.TrainConfig(
            engine=engine, global_batch=24, epochs=3, seed=5, threads=1, device="cpu", progress=False,
            run_dir=folder,
        ),
    )  # fmt: skip
    found = trainer.fit(data(0, 96))
    print(json.dumps([str(found.state_hash), ray.is_initialized()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
