"""What one worker does for `Trainer`: the whole of training, of an evaluation or of a prediction.

The loop itself is three lines of `train`; what happens between two of its turns is in run.py. Must not know
how the worker was started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.aggregate.strategy import Aggregation
from paceline.comm.context import DistributedContext
from paceline.data.sources import as_source
from paceline.train import evaluation, last_save, run_setup
from paceline.train.assembly import Assembled, Given
from paceline.train.callbacks import Callbacks, Modifier, Observer
from paceline.train.compilation import compiled
from paceline.train.config import TrainConfig
from paceline.train.ending import conclude
from paceline.train.evaluation import Forward
from paceline.train.history import History
from paceline.train.loop_guard import refuse_wrapped
from paceline.train.micro_batch_finder import find_for_run, is_out_of_memory
from paceline.train.nesting import inside_a_run
from paceline.train.objective import Objective
from paceline.train.own_process import OwnProcess
from paceline.train.precision import autocast
from paceline.train.run import Run
from paceline.train.run_parts import Micro
from paceline.train.signals import StopRequest, listening
from paceline.train.state import model_tensors
from paceline.train.team import Team


@dataclass(frozen=True)
class TrainJob:
    """All of a training run, as it travels to the workers. `config` is resolved."""

    model: nn.Module | Callable[[], nn.Module]
    objective: Callable[..., Any]
    optimizer: Any
    config: TrainConfig
    train: Any
    validation: Any = None
    callbacks: Sequence[Observer | Modifier] = ()
    folder: Path | None = None
    stop_file: Path | None = None
    aggregation: Aggregation | None = None  # of the user's own, for mode="fast"
    process: OwnProcess | None = None  # given where the process was started for this job


@dataclass(frozen=True)
class Trained:
    """What comes back from a worker; only the main rank sends history and weights."""

    history: History | None
    weights: dict[str, Tensor]
    stopped: str | None


@dataclass(frozen=True)
class Built:
    """What a worker has before it knows its group."""

    module: nn.Module
    call: Callable[..., Any]  # the module, compiled where that was asked for
    objective: Objective
    device: torch.device
    given: Given
    validation: Any

    def evaluation(self, team: Team) -> Callable[[], tuple[dict[str, float], int]] | None:
        if self.validation is None:
            return None
        forward = _forward(team, self.module, self.call, self.device, self.given.config)
        return lambda: evaluation.evaluate(forward, self.objective, self.validation)


def build(job: TrainJob, stack: ExitStack, number: int, observers: Sequence[Observer] = ()) -> Built:
    """Model, objective and data of a job, on the device of worker `number`."""
    config = job.config
    device = run_setup.choose_device(config, number)
    module = run_setup.build_model(job.model, config.seed).to(device).train()
    refuse_wrapped(module)
    objective = Objective(job.objective)
    objective.to(device)
    stack.enter_context(run_setup.recomputing(module, config.activation_checkpointing))
    call = stack.enter_context(compiled(module, config))
    given = Given(
        module,
        job.optimizer,
        config,
        as_source(job.train),
        job.callbacks,
        job.folder,
        observers,
        job.aggregation,
    )
    validation = None if job.validation is None else as_source(job.validation)
    return Built(module, call, objective, device, given, validation)


def new_team(
    context: DistributedContext,
    config: TrainConfig,
    announce: Callable[[DistributedContext], None] | None = None,
) -> Team:
    shards = config.shards or config.workers if config.mode == "exact" else None
    return Team(context, shards, announce=announce)


def walk_to_the_end(run: Run, built: Built, assembled: Assembled) -> None:
    """Train and conclude; train on where the group went back to a checkpoint while it concluded."""
    while True:
        walk(run, built, assembled)
        if run.conclude():
            return


def walk(run: Run, built: Built, assembled: Assembled) -> None:
    """The loop itself."""
    with inside_a_run():
        _walk(run, built, assembled)


def _walk(run: Run, built: Built, assembled: Assembled) -> None:
    objective, checked = built.objective, False
    for micro in run.microbatches():
        try:
            with autocast(assembled.config.precision, built.device):
                scored = objective.score(built.call, assembled.callbacks.change_batch(micro.data))
            run.backward(scored.loss, scored.metrics)
            if not checked:
                objective.check_unchanged()
                checked = True
        except Exception as error:
            error.add_note(_where(micro, built.given))
            if is_out_of_memory(error):
                error.add_note(
                    'try: micro_batch="auto", which finds the largest micro-batch that fits before the first '
                    "step, or a smaller one by hand"
                )
            raise
    objective.check_unchanged()


def train(context: DistributedContext, job: TrainJob) -> Trained:
    """Trains on this rank, together with the others of the context."""
    config = job.config
    if job.process is not None:
        job.process.settle()
    stop = StopRequest(job.stop_file)
    with ExitStack() as stack:
        ours = job.stop_file is not None  # the process was started for this run
        stack.enter_context(listening(stop.ask, to_the_end=ours, ctrl_c=not ours))
        stack.enter_context(run_setup.prepared(config))
        started = time.perf_counter()
        built = build(job, stack, context.rank, _observers(config, context, stack))
        team = new_team(context, config)
        assembled = Assembled(team, built.given, built.device, stop)
        stack.push(assembled)
        run = assembled.run(built.evaluation(team))
        if context.is_master:
            assembled.callbacks.start(assembled.info(run))
        try:
            walk_to_the_end(run, built, assembled)
            history = conclude(run, assembled, started)
        except Exception as error:
            last_save.save_unsupervised(run, assembled, error)
            raise
        return trained(run, built.module, history)


def trained(run: Run, module: nn.Module, history: History | None) -> Trained:
    """What this worker sends back."""
    stopped = run.ended if run.stopped_on_request else None
    if history is None:
        return Trained(None, {}, stopped)
    weights = {name: tensor.detach().cpu() for name, tensor in model_tensors(module).items()}
    return Trained(history, weights, stopped)


def find_micro_batch(context: DistributedContext, job: TrainJob) -> int:
    """The largest micro-batch that fits on every rank, tried by all of them at once: they may share a GPU."""
    if job.process is not None:
        job.process.settle()
    with ExitStack() as stack:
        stack.enter_context(run_setup.prepared(job.config))
        built = build(job, stack, context.rank)
        callbacks = Callbacks(job.callbacks)
        context.barrier()
        found = find_for_run(
            job.config,
            built.module,
            built.call,
            built.objective,
            built.given.data,
            built.device,
            callbacks.change_batch if callbacks.modifiers else None,
        )
        return int(min(context.all_gather(found)))


def evaluate(context: DistributedContext, job: TrainJob) -> dict[str, float]:
    """Loss and metrics of the model on `job.train`."""
    with run_setup.prepared(job.config):
        device, module = _placed(context, job)
        objective = Objective(job.objective)
        objective.to(device)
        with compiled(module, job.config) as call:
            forward = _forward(Team(context, None), module, call, device, job.config)
            found = evaluation.evaluate(forward, objective, as_source(job.train))[0]
        objective.check_unchanged()
        return found


def predict(context: DistributedContext, job: TrainJob) -> Any:
    """The model's outputs for `job.train`, on the main rank."""
    with run_setup.prepared(job.config):
        device, module = _placed(context, job)
        with compiled(module, job.config) as call:
            forward = _forward(Team(context, None), module, call, device, job.config)
            return evaluation.predict(forward, as_source(job.train))


def _placed(context: DistributedContext, job: TrainJob) -> tuple[torch.device, nn.Module]:
    device = run_setup.choose_device(job.config, context.rank)
    return device, run_setup.build_model(job.model, job.config.seed).to(device)


def _forward(
    team: Team,
    module: nn.Module,
    call: Callable[..., Any],
    device: torch.device,
    config: TrainConfig,
) -> Forward:
    batch = config.micro_samples or -(-config.first_batch // (config.shards or config.workers))
    return Forward(team, module, call, device, config.precision, config.seed, batch)


def _observers(config: TrainConfig, context: DistributedContext, stack: ExitStack) -> list[Observer]:
    if not config.progress or not context.is_master:
        return []
    # Here, in the worker: the caller needs no terminal library, which draws a random number when imported.
    from paceline.train.progress import Progress

    progress = Progress()
    stack.callback(progress.close)
    return [progress]


def _where(micro: Micro, given: Given) -> str:
    step = micro.step + 1  # as in the journal: the number that it would have had
    text = f"in epoch {micro.epoch}, step {step}, shard {micro.shard}, a micro-batch of {micro.count}"
    batch, size = given.config.first_batch, given.data.size
    if (
        given.config.dynamic_batch is None
        and micro.count == 1
        and batch > 1
        and size is not None
        and size % batch
    ):
        text += (
            f"\nthe last batch of an epoch holds {size} % {batch} = {size % batch} samples, cut into "
            f"{given.config.shards} shards; where one sample is too few (BatchNorm), use drop_last=True or "
            "another global_batch"
        )
    return text
