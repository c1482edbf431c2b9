"""A search on a Ray cluster, as a program: python -m tests.clusters.tune.ray_search ADDRESS FOLDER [resume]

Says by the file FOLDER/connected that it is connected to Ray. Trials from number 2 on wait for the file
FOLDER/open, and say so by FOLDER/at-NUMBER, which holds the name of their host. Prints a line TRIALS with
the trials as JSON; Ray prints others.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

import paceline
from paceline.core.atomic_file import replace_file

TRIALS = 6


def search(folder: Path, engine: Any = "local") -> paceline.DistributedTuner:
    def train(params: dict[str, float]) -> float:
        number = int(paceline.tune.folder().name)
        if number >= 2:
            replace_file(folder / f"at-{number}", os.environ.get("PACELINE_HOST", "").encode())
            wait_for((folder / "open").exists, "the gate is opened")
        return params["x"]

    return paceline.DistributedTuner(
        train,
        {"x": paceline.tune.uniform(-3, 3)},
        engine=engine,
        num_gpus=2,
        seed=4,
        sampler="tpe",
        study=folder / "study",
        verbose=False,
    )


def outcome(found: paceline.DistributedTuner) -> list[list[Any]]:
    return [[one.number, one.params["x"], one.state, one.value] for one in found.trials]


def main(address: str, folder: str, resume: str = "") -> None:
    import ray

    ray.init(address=address, log_to_driver=False)
    Path(folder, "connected").touch()
    found = search(Path(folder), paceline.Ray(address=address))
    found.tune(TRIALS, resume=bool(resume))
    print("TRIALS", json.dumps(outcome(found)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
