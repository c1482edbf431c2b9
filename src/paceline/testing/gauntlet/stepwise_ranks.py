"""Processes that train in a loop of their own, as a user's program does: step by step, with
`DistributedTrainingManager`, or in a `session`; a fault of the plan ends some of them.

    python -m paceline.testing.gauntlet.stepwise_ranks      one start per line of input, as JSON

Torch is loaded once, then each process is forked. Nothing replaces a process that dies: those with a manager
go on without it, those of a session end. A run journal, of views and failures alone, tells what injects
faults from outside which processes there are.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import torch
from torch import Tensor

from paceline.checkpoint.store import CheckpointStore
from paceline.comm.context import DistributedContext
from paceline.core.chaos_spec import Chaos
from paceline.core.errors import GROUP_FAILURES
from paceline.core.events import Event, FaultInjected, ViewChanged, WorkerFailed
from paceline.core.journal import Journal
from paceline.frontends.manager.training_manager import DistributedTrainingManager
from paceline.frontends.session import TrainingSession, session
from paceline.testing.gauntlet import models
from paceline.train.member.fault_injection import FaultInjector
from paceline.train.settings.train_config import CheckpointConfig, TrainConfig
from paceline.train.state.model_state import hash_of, state_hash
from paceline.train.state.weight_averages import EMA
from paceline.train.stop_signals import Stopped

LoopKind = Literal["manager", "session"]

BATCH: Final = 12
_SAVE_EVERY: Final = 15
_CONNECTED: Final = "connected\n"
_TIMEOUT: Final = 60.0  # of an exchange
_INTO_THE_EXCHANGE: Final = 0.0003  # seconds from the end of backward


@final
@dataclass(frozen=True)
class StepwiseStart:
    """One start of the program. `number` tells it from other starts of the same run."""

    folder: str
    number: int
    workers: int
    port: int
    steps: int
    shards: int
    seed: int
    chaos: str = ""
    resume: bool = False
    loop: LoopKind = "manager"


class _Rank(abc.ABC):
    """One process: the loop of a user's own, with the places where it dies."""

    def __init__(self, start: StepwiseStart, rank: int) -> None:
        self._start, self._rank = start, rank
        chaos = Chaos(start.chaos) if start.chaos else None
        self._injector = FaultInjector(chaos, slot=rank, announce=self._note)
        self._step = 0
        self._x, self._y = models.numbers()

    @abc.abstractmethod
    def train(self, report: int) -> str:
        """Train to the end; return the hash of the weights, or nothing where the run has to be started again.
        `report`: the descriptor that gets a byte when this process has met the others."""

    def _record(self, step: int, loss: float) -> None:
        with Path(self._start.folder, f"losses-{self._start.number}-{self._rank}").open("a") as file:
            file.write(f"{step} {loss.hex()}\n")

    # where it dies

    def _enter(self, phase: str, step: int | None = None) -> None:
        self._step = self._step if step is None else step
        self._injector.at(phase, self._step)

    def _loss(self, model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        self._enter("forward")
        loss, metrics = models.classify(model, batch)
        if loss.requires_grad:
            loss.register_hook(self._in_backward)  # type: ignore[no-untyped-call]
        return loss, metrics

    def _in_backward(self, gradient: Tensor) -> Tensor:
        self._enter("backward")
        # What follows the last shard's backward is the exchange.
        timer = threading.Timer(_INTO_THE_EXCHANGE, self._enter, ("collective",))
        timer.daemon = True
        timer.start()
        return gradient

    def _optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        made = models.adam(parameters)
        made.register_step_pre_hook(lambda *_: self._enter("optimizer"))
        return made

    def _note(self, event: FaultInjected, before: int, *, once: bool) -> bool:
        note(self._start, event)
        return True


@final
class _ManagerRank(_Rank):
    """A loop over the steps of a manager: it goes on without those that die."""

    def train(self, report: int) -> str:
        start = self._start
        torch.manual_seed(start.seed)
        module = models.with_batch_norm()
        folder = Path(start.folder, "checkpoints")
        settings = {
            "world_size": start.workers,
            "local_rank": self._rank,
            "address": f"127.0.0.1:{start.port}",
            "batch_size": BATCH,
            "shards": start.shards,
            "seed": start.seed,
            "checkpoint_dir": folder,
            "timeout": _TIMEOUT,
        }
        with DistributedTrainingManager(settings) as manager:
            manager.init_environment()
            os.write(report, _CONNECTED.encode())
            samples = len(self._x)
            self._together(
                manager, lambda: manager.prepare_training(module, samples, self._loss, self._optimizer)
            )
            saved = [one.info.step for one in CheckpointStore(str(folder)).manifests()]
            if start.resume and saved:
                self._together(manager, lambda: manager.load_checkpoint(max(saved)))
            while manager.next_step < start.steps:
                self._take_step(manager)
        return state_hash(module)

    def _take_step(self, manager: DistributedTrainingManager) -> None:
        step = manager.next_step
        self._enter("data", step + 1)
        first = step * BATCH % (len(self._x) - BATCH)
        begin, end = manager.get_local_batch(BATCH)
        batch = self._x[first + begin : first + end], self._y[first + begin : first + end]
        metrics = manager.train_step(batch, step)
        if metrics.error_code == manager.ERROR_PROCESS_FAILURE:
            self._enter("wait")
            manager.handle_failure(metrics.failed_process_rank)
            return
        self._record(step, metrics.loss)
        if manager.next_step % _SAVE_EVERY == 0:
            self._enter("checkpoint")
            manager.save_checkpoint(manager.next_step)

    def _together(self, manager: DistributedTrainingManager, call: Callable[[], int]) -> None:
        while call() != manager.SUCCESS:
            self._enter("wait")
            manager.handle_failure(-1)


@final
class _SessionRank(_Rank):
    """A loop over the micro-batches of a session, with a scheduler and an average: where one process dies,
    the others end, and all are started again."""

    def train(self, report: int) -> str:
        start = self._start
        torch.manual_seed(start.seed)
        module = models.with_batch_norm()
        average = EMA(0.9)
        config = TrainConfig(
            shards=start.shards,
            threads=1,
            global_batch=BATCH,
            max_steps=start.steps,
            seed=start.seed,
            device="cpu",
            progress=False,
            scheduler_interval="step",
            timeout=_TIMEOUT,
            run_dir=str(Path(start.folder, "session")),
            resume="auto",
            checkpoint=CheckpointConfig(every_steps=_SAVE_EVERY),
        )
        address = f"127.0.0.1:{start.port}"
        try:
            with DistributedContext(start.workers, self._rank, address=address, timeout=_TIMEOUT) as group:
                os.write(report, _CONNECTED.encode())
                optimizer = self._optimizer(list(module.parameters()))
                with session(
                    module,
                    optimizer,
                    config,
                    scheduler=models.one_cycle,
                    callbacks=[average],
                    context=group,
                ) as run:
                    self._loop(run, module)
        except (*GROUP_FAILURES, Stopped):
            return ""
        for record in run.history.steps if run.history is not None else ():
            self._record(record.step, record.loss)
        return state_hash(module) + hash_of(average.weights)

    def _loop(self, run: TrainingSession, module: torch.nn.Module) -> None:
        for micro in run.microbatches((self._x, self._y)):
            self._enter("data", micro.step + 1)
            if run.step % _SAVE_EVERY == 0:
                self._enter("checkpoint")  # it is being written
            run.backward(*self._loss(module, micro.data))


def note(start: StepwiseStart, event: Event) -> None:
    with Journal(Path(start.folder, "journal.jsonl")) as journal:
        journal.append(event)


def _forked(start: StepwiseStart, rank: int) -> tuple[int, int]:
    """Return a process's number, and the descriptor of its report: a line once it is connected, and at its
    end the hash of its weights."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        os.close(reading)
        kind = _SessionRank if start.loop == "session" else _ManagerRank
        found = kind(start, rank).train(writing)
        os.write(writing, found.encode())
        code = 0
    except BaseException:
        os.write(writing, b"error\n" + traceback.format_exc().encode())
    finally:
        os._exit(code)


def run(start: StepwiseStart) -> list[str]:
    """Return what each process ended with: a hash, "" of one that was killed, or its traceback."""
    Path(start.folder).mkdir(parents=True, exist_ok=True)
    processes = [_forked(start, rank) for rank in range(start.workers)]
    pipes = [os.fdopen(reading) for _, reading in processes]
    first = [pipe.readline() for pipe in pipes]
    pids = [pid for pid, _ in processes]
    ranks = list(range(start.workers))
    if all(line == _CONNECTED for line in first):
        shards: list[list[int]] = [[] for _ in ranks]
        hosts = [""] * len(ranks)
        note(
            start,
            ViewChanged(
                time=time.time(),
                generation=1,
                reason="they have met",
                members=ranks,
                shards=shards,
                pids=pids,
                hosts=hosts,
                step=0,
            ),
        )
    ends = []
    for rank, (pid, pipe, begun) in enumerate(zip(pids, pipes, first, strict=True)):
        with pipe:
            ends.append(("" if begun == _CONNECTED else begun) + pipe.read())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status < 0:
            reason = f"killed by signal {-status}"
            note(start, WorkerFailed(time=time.time(), rank=rank, pid=pid, phase="", reason=reason))
    return ends


def main() -> None:
    """Serve starts until the input ends."""
    torch.set_num_threads(1)
    module = models.with_batch_norm()
    # What a training imports, before processes are forked; without a backward pass, which no fork survives.
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    models.adam(list(module.parameters())).step()
    for line in sys.stdin:
        answer = run(StepwiseStart(**json.loads(line)))
        os.write(1, (json.dumps(answer) + "\n").encode())


def encoded(start: StepwiseStart) -> str:
    return json.dumps(dataclasses.asdict(start)) + "\n"


if __name__ == "__main__":
    main()
