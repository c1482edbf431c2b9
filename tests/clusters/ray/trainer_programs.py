"""RayTrainer in Ray Tune and Ray Serve; programs of the tests:

    python -m tests.clusters.ray.trainer_programs NAME ADDRESS FOLDER [PORT]

Each prints a line of JSON at its end.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import ray
import torch
from ray import serve, tune
from tests.clusters.ray.small_training import SETTINGS, build, data
from torch import nn

import paceline


def trained(config: dict[str, Any]) -> paceline.RayTrainer:
    trainer = paceline.RayTrainer(build, config, loss_fn=nn.CrossEntropyLoss())
    trainer.fit(data(0, 96), data(1, 48))
    return trainer


def trial(config: dict[str, Any]) -> None:
    trained(config)


def hash_of(folder: str | Path) -> str:
    return str(paceline.state_hash(paceline.RayTrainer.load(folder)))


def tuner(address: str, folder: str) -> dict[str, Any]:
    """Two trials with two agents each, in the trials' own bundles."""
    ray.init(address, log_to_driver=False)
    engine = paceline.Ray(nodes=2, share_nodes=True)
    run = tune.Tuner(
        tune.with_resources(trial, engine.trial_resources()),
        param_space={**SETTINGS, "num_workers": 2, "lr": tune.grid_search([0.05, 0.001])},
        tune_config=tune.TuneConfig(metric="val_accuracy", mode="max"),
        run_config=tune.RunConfig(storage_path=folder, name="tuner", verbose=0),
    )
    results = run.fit()
    assert not results.errors, results.errors
    best = results.get_best_result()
    return {
        "iterations": [result.metrics["training_iteration"] for result in results],
        "best": {name: best.metrics[name] for name in ("epoch", "val_accuracy", "loss", "val_loss")}
        | {"lr": best.config["lr"]},
        "hash": hash_of(best.checkpoint.path),
        "agents": [
            "agents" if "engine" in (path / "paceline" / "config.toml").read_text() else "beside"
            for path in map(Path, (result.path for result in results))
        ],
    }


def run(address: str, folder: str) -> dict[str, Any]:
    """`tune.run` without bundles for agents: local workers beside the trial, which Tune stops early."""
    ray.init(address, log_to_driver=False)
    analysis = tune.run(
        trial,
        config={**SETTINGS, "num_workers": 2, "epochs": 50},
        stop={"training_iteration": 2},
        storage_path=folder,
        name="run",
        verbose=0,
    )
    (found,) = analysis.trials
    return {"status": found.status, "iterations": found.last_result["training_iteration"]}


def by_settings(address: str, folder: str) -> dict[str, Any]:
    """The same settings for the workers of Ray and for those of PyTorchDDPTrainer, with accumulation."""
    os.environ["RAY_ADDRESS"] = address
    found = {}
    for backend in ("ray", "pytorch-ddp"):
        config = paceline.DistributedConfig(
            backend=backend,
            num_gpus=2,
            batch_size=8,
            gradient_accumulation_steps=2,
            epochs=2,
            checkpoint_dir=f"{folder}/{backend}",
            checkpoint_frequency=1,
        )
        trainer = paceline.make_trainer(
            lambda: build(SETTINGS),
            config,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9),
            loss_fn=nn.CrossEntropyLoss(),
        )
        found[backend] = trainer.fit(torch.utils.data.TensorDataset(*data(0, 96))).state_hash
    return found


def served(address: str, folder: str, port: str) -> dict[str, Any]:
    """An export in a deployment of Ray Serve, by HTTP and by handle."""
    trainer = trained({**SETTINGS, "address": address, "num_workers": 2})
    exported = trainer.export(Path(folder, "export"))
    inputs = data(1, 4)[0]
    ray.init(address, log_to_driver=False)
    serve.start(http_options={"port": int(port), "location": "HeadOnly"})
    handle = serve.run(paceline.RayTrainer.serve(exported), name="model")
    by_handle = handle.predict.remote(inputs.tolist()).result(timeout_s=60)
    whole = [[1, 0, 2, 0, 1, 3]]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/", json.dumps({"inputs": whole}).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        by_http = json.loads(reply.read())["outputs"]
    serve.shutdown()
    assert isinstance(trainer.model, nn.Module)
    expected = [trainer.model.eval()(one).tolist() for one in (inputs, torch.tensor(whole).float())]
    return {
        "same": [one == other for one, other in zip((by_handle, by_http), expected, strict=True)],
        "accuracy": trainer.best_accuracy,
        "hash": str(paceline.state_hash(trainer.model)),
    }


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
