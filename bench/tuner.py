"""64 short trials on 2 cores: `DistributedTuner`, Optuna with processes of its own, and Ray Tune.

Each trial trains a small network with torch for a twentieth of a second. All sides evaluate the trials that
Optuna's random sampler draws with one seed, so that the best value must be equal, bit for bit:

    paceline     DistributedTuner, 2 trials at once, each in a process of its own
    optuna       2 processes that share a study in a journal file, as Optuna's documentation has it
    ray tune     a Tuner with OptunaSearch, 2 trials at once, on a local cluster that runs already

Seconds are those from the call to the best value, in a Python that has imported all it needs. Paceline's fork
server is warm, as in every search but the first of a process; "first" is Paceline's first search, in which
the server is started and imports torch and this module. Optuna's processes are started for each search,
because that is how Optuna runs in several processes. Ray's cluster runs already; with its default
(reuse_actors=False) it starts a process per trial, which imports torch. Sides take turns; medians, and the
least and the most.

Needs optuna, and for Ray Tune ray[tune]: run it with the Python of the engines' environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paceline
from bench.report import Report, Target, main
from paceline.core.errors import UnavailableError
from paceline.engines.local import shutdown

TRIALS = 64
SLOTS = 2
SEED = 7
ROUNDS = 3
LEAST_OVER_OPTUNA = 1.5
LEAST_OVER_RAY = 3.0

_OPTUNA_PROCESS = """
import sys
import optuna, torch
from bench.tuner import distributions, open_journal, train
optuna.logging.set_verbosity(optuna.logging.WARNING)
torch.set_num_threads(1)
study = optuna.load_study(study_name="bench", storage=open_journal(sys.argv[1]))
left = int(sys.argv[2])
for _ in range(left):
    trial = study.ask(distributions())
    study.tell(trial, train(trial.params))
"""


def train(params: dict[str, Any]) -> float:
    """Train a small network; return its loss."""
    import torch

    torch.manual_seed(0)
    inputs = torch.randn(512, 32)
    targets = (inputs[:, :8].sum(dim=1) > 0).long()
    model = torch.nn.Sequential(
        torch.nn.Linear(32, int(params["width"])), torch.nn.ReLU(), torch.nn.Linear(int(params["width"]), 2)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return loss.item()


def distributions() -> dict[str, Any]:
    """The search space, as Optuna has it."""
    from optuna.distributions import FloatDistribution, IntDistribution

    return {"lr": FloatDistribution(1e-4, 1e-1, log=True), "width": IntDistribution(16, 128)}


def open_journal(path: str) -> Any:
    """Optuna's own storage in a file."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(path))


def with_paceline(folder: Path) -> float:
    tuner = paceline.DistributedTuner(
        train,
        distributions(),
        num_gpus=SLOTS,
        mode="min",
        sampler="random",
        seed=SEED,
        study=folder / "study",
        preload=("bench.tuner",),
        verbose=False,
    )
    tuner.tune(TRIALS)
    return tuner.best_value


def with_optuna(folder: Path) -> float:
    """Enqueue what the sampler draws with the seed: each process has a sampler of its own, whose draws would
    be others."""
    import optuna

    path = str(folder / "journal.log")
    study = optuna.create_study(study_name="bench", storage=open_journal(path))
    for params in _drawn():
        study.enqueue_trial(params)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _OPTUNA_PROCESS, path, str(TRIALS // SLOTS)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(SLOTS)]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise UnavailableError("a process of Optuna failed", remedy="see its output above")
    return float(study.best_value)


def _drawn() -> list[dict[str, Any]]:
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=SEED))
    return [dict(study.ask(distributions()).params) for _ in range(TRIALS)]


def with_ray(folder: Path) -> float:
    import optuna
    from ray import tune
    from ray.tune.search import ConcurrencyLimiter
    from ray.tune.search.optuna import OptunaSearch

    search = OptunaSearch(
        sampler=optuna.samplers.RandomSampler(seed=SEED),
        metric="loss",
        mode="min",
    )

    def trial(config: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        tune.report({"loss": train(config)})

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 1}),
        param_space={"lr": tune.loguniform(1e-4, 1e-1), "width": tune.randint(16, 129)},
        tune_config=tune.TuneConfig(
            num_samples=TRIALS, search_alg=ConcurrencyLimiter(search, SLOTS), metric="loss", mode="min"
        ),
        run_config=tune.RunConfig(storage_path=str(folder), verbose=0),
    )
    return float(tuner.fit().get_best_result().metrics["loss"])


def timed(side: Callable[[Path], float]) -> tuple[float, float]:
    """Seconds of one search, and its best value."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        best = side(Path(folder))
        return time.monotonic() - begun, best


def measure(sides: dict[str, Callable[[Path], float]]) -> tuple[dict[str, list[float]], set[float]]:
    """Seconds of each side, in turns, and all best values."""
    shutdown()
    first, best = timed(with_paceline)
    seconds: dict[str, list[float]] = {"paceline, first": [first], **{name: [] for name in sides}}
    values = {best}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            took, best = timed(side)
            seconds[name].append(took)
            values.add(best)
    return seconds, values


@contextlib.contextmanager
def _ray_cluster() -> Any:
    import logging

    import ray

    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    ray.init(num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def run() -> Report:
    """Trials per second of each side."""
    if importlib.util.find_spec("optuna") is None:
        raise UnavailableError("optuna is not installed", remedy="pip install 'paceline[tune]'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sides: dict[str, Callable[[Path], float]] = {"paceline": with_paceline, "optuna": with_optuna}
    with contextlib.ExitStack() as stack:
        if importlib.util.find_spec("ray") is not None:
            sides["ray tune"] = with_ray
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(_ray_cluster())
        seconds, values = measure(sides)
    report = Report(
        "tuner",
        f"{TRIALS} trials, {SLOTS} at once: seconds, and trials per second",
        ("side", "median s", "least", "most", "trials/s"),
        data={"seconds": seconds, "best": sorted(values)},
    )
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, found in seconds.items():
        times = (f"{one:.2f}" for one in (medians[name], min(found), max(found)))
        report.rows.append((name, *times, f"{TRIALS / medians[name]:.1f}"))
    over = medians["optuna"] / medians["paceline"]
    report.targets.append(Target("throughput over Optuna's processes", over, LEAST_OVER_OPTUNA))
    first = medians["optuna"] / medians["paceline, first"]
    report.targets.append(Target("the same, first search of a process", first, 1.0))
    if "ray tune" in medians:
        ray_over = medians["ray tune"] / medians["paceline"]
        report.targets.append(Target("throughput over Ray Tune", ray_over, LEAST_OVER_RAY))
    else:
        report.rows.append(("ray tune", "not installed", "", "", ""))
    report.targets.append(Target("different best values", len(values), 1, at_least=False, unit=""))
    return report


if __name__ == "__main__":
    main(run)
