"""A program of the manager, as a user writes it, and processes of it that are killed at chosen moments.

`python -m tests.frontends.manager.manager_program SCENARIOS` runs each scenario of a JSON list in processes
that it forks (torch is loaded once) and prints their reports as JSON; with `--one SCENARIO` this process is
one rank, and its launcher has set the environment. A scenario:

    world     processes to start; absent under a launcher
    settings  of the manager
    steps     to take; `load`: the checkpoint to begin from; `save`: the step after which one is saved
    kills     [rank, moment, step]: "forward", "collective", "optimizer" are phases of the step; "exchange"
              and a number is that call of the transport within it; "repair" is in handle_failure; "save" is
              while the checkpoint is written
    hosts     every process counts as another host
    environment   further variables of every process
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import paceline
from paceline.checkpoint.writer import BackgroundWriter
from paceline.comm import default_group
from paceline.train.loop.stepwise_run import StepwiseRun
from paceline.train.phases import Phases

BATCH, SAMPLES = 24, 96
_CLASSES = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, _CLASSES)
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 8, generator=made)
    return inputs, torch.randint(0, _CLASSES, (SAMPLES,), generator=made)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, scenario: dict[str, Any]) -> dict[str, Any]:
    inputs, targets = data()
    module = model()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline").addHandler(handler)
    manager = paceline.DistributedTrainingManager({"batch_size": BATCH, **scenario.get("settings", {})})
    _arm(scenario, rank)
    assert manager.init_environment() == 0
    assert manager.prepare_training(module, total_samples=SAMPLES) == 0
    if "load" in scenario:
        assert manager.load_checkpoint(scenario["load"]) == 0
    report: dict[str, Any] = {"lost": [], "losses": [], "ranges": []}
    metrics = paceline.StepMetrics()
    while manager.next_step < scenario.get("steps", 4):
        step = manager.next_step
        _strike_in_exchange(scenario, rank, step)
        first = step * BATCH % SAMPLES
        start, end = manager.get_local_batch(BATCH)
        batch = inputs[first + start : first + end], targets[first + start : first + end]
        metrics = manager.train_step(batch, step)
        if metrics.error_code == manager.ERROR_PROCESS_FAILURE:
            begun = time.perf_counter()
            report["lost"].append(metrics.failed_process_rank)
            assert manager.handle_failure(metrics.failed_process_rank) == 0
            report["repair_seconds"] = time.perf_counter() - begun
            continue
        assert metrics.error_code == 0
        report["losses"].append(metrics.loss)
        report["ranges"].append([start, end])
        if step == scenario.get("save"):
            assert manager.save_checkpoint(step) == 0
    report |= {
        "rank": manager.rank,
        "world_size": manager.world_size,
        "hash": paceline.state_hash(module),
        "times": [metrics.training_time, metrics.comm_time, metrics.compute_efficiency],
        "accuracy": metrics.accuracy,
        "learning_rate": metrics.learning_rate,
        "said": said,
    }
    manager.close()
    return report


def _arm(scenario: dict[str, Any], rank: int) -> None:
    """Have this process kill itself at the moments that are meant for it."""
    for victim, moment, step in scenario.get("kills", ()):
        if victim != rank:
            continue
        if moment == "repair":
            StepwiseRun.rebind = lambda self, context: die()  # type: ignore[method-assign]
        elif moment == "save":
            BackgroundWriter.commit = lambda self, *given: die()  # type: ignore[method-assign]
        elif not moment.startswith("exchange"):
            _arm_phase(moment, step + 1)


def _arm_phase(moment: str, number: int) -> None:
    enter = Phases.enter

    def struck(self: Phases, phase: str, **how: bool) -> None:
        if (phase, self.step) == (moment, number):
            die()
        enter(self, phase, **how)

    Phases.enter = struck  # type: ignore[method-assign]


def _strike_in_exchange(scenario: dict[str, Any], rank: int, step: int) -> None:
    for victim, moment, when in scenario.get("kills", ()):
        if (victim, when) == (rank, step) and moment.startswith("exchange"):
            window: Any = default_group.required("a test").transport.window
            left = iter(range(int(moment.split()[1]) - 1, -1, -1))
            window.signal = _struck(window.signal, left)
            window.wait = _struck(window.wait, left)


def _struck(call: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    def struck(*given: Any, **named: Any) -> Any:
        if next(left) == 0:
            die()
        return call(*given, **named)

    return struck


def _forked(rank: int, scenario: dict[str, Any], port: int) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.environ.update(scenario.get("environment", {}))
        if scenario.get("hosts"):
            os.environ["PACELINE_HOST"] = f"host-{rank}"
        by_hand = {"world_size": scenario["world"], "local_rank": rank, "address": f"127.0.0.1:{port}"}
        settings = {**by_hand, **scenario.get("settings", {})}
        report = train(rank, {**scenario, "settings": settings})
        os.write(writing, json.dumps(report).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(scenario: dict[str, Any], port: int) -> list[Any]:
    """The report of each process; the signal's number of one that was killed."""
    started = [_forked(rank, scenario, port) for rank in range(scenario["world"])]
    reports: list[Any] = []
    for pid, reading in started:
        with open(reading, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        reports.append(json.loads(text) if text else os.waitstatus_to_exitcode(status))
    return reports


def _load_all() -> None:
    """Import what a training imports, before processes are forked. Without a backward pass: autograd does not
    survive a fork."""
    module = model()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(module.parameters()).step()


def main() -> None:
    if sys.argv[1] == "--one":
        scenario = json.loads(sys.argv[2])
        rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
        os.write(1, f"REPORT {json.dumps(train(rank, scenario))}\n".encode())
        return
    first_port = int(sys.argv[2])
    torch.set_num_threads(1)
    _load_all()
    print(json.dumps([_run(scenario, first_port) for scenario in json.loads(sys.argv[1])]))


if __name__ == "__main__":
    main()
