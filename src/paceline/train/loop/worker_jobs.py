"""Tasks of one worker for `Trainer`: all of training, of an evaluation or of a prediction.

`train_steps` is the training loop; what happens between two micro-batches is in run.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.context import DistributedContext
from paceline.core.wording import counted
from paceline.data.sources import Source, as_source
from paceline.train.callbacks import Callbacks, Modifier, Observer, inside_a_run
from paceline.train.history import History
from paceline.train.loop import evaluation, process_setup
from paceline.train.loop.evaluation import Forward
from paceline.train.loop.finalize import conclude, save_unsupervised
from paceline.train.loop.micro_batch_finder import find_for_run, is_out_of_memory
from paceline.train.loop.process_setup import WorkerProcessTuning, compiled
from paceline.train.loop.run import Run
from paceline.train.loop.run_builder import RunBuilder, RunSpec
from paceline.train.loop.run_hooks import Evaluate, GroupChangedError, MicroBatch, one_group
from paceline.train.loop.step_profiler import profiled
from paceline.train.loop.whole_set_metrics import WholeSetMetrics
from paceline.train.objective import Objective, ObjectiveResult
from paceline.train.precision import autocast
from paceline.train.settings.evaluation_config import EvaluationConfig
from paceline.train.settings.train_config import TrainConfig
from paceline.train.state import weight_averages
from paceline.train.state.model_state import model_tensors
from paceline.train.step.aggregation_registry import Aggregation
from paceline.train.step.misuse_guard import refuse_wrapped
from paceline.train.step.unfreezing import Unfreezing
from paceline.train.step_info import StepInfo
from paceline.train.stop_signals import StopRequest, listening
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
    display: Callable[[], AbstractContextManager[Observer]] | None = None  # on the main rank's terminal
    process: WorkerProcessTuning | None = None  # given where the process was started for this job
    scheduler: Any = None
    info: StepInfo = field(default_factory=StepInfo)  # of the weights, where they are evaluated alone
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


@dataclass(frozen=True)
class TrainResult:
    """Result of a worker's training; only the main rank sends history and weights. `averages`: of each
    EMA or SWA among the callbacks, in their order."""

    history: History | None
    weights: dict[str, Tensor]
    stopped: str | None
    averages: Sequence[dict[str, Tensor] | None] = ()


@dataclass(frozen=True)
class BuiltModel:
    """Model, objective and data of a worker, built before it knows its group."""

    module: nn.Module
    call: Callable[..., Any]  # the module, compiled where that was asked for
    objective: Objective
    device: torch.device
    spec: RunSpec
    evaluated: EvaluationConfig
    validation: Mapping[str, Source]  # the sets by name; that of `fit` has none

    def loss_of(self, micro: MicroBatch, change: Callable[[Any], Any]) -> ObjectiveResult:
        """Compute the loss of a micro-batch, its data changed before."""
        with autocast(self.spec.config.precision, self.device):
            return self.objective.score(self.call, change(micro.data), micro.info)

    def loss_together(self, micro: MicroBatch, change: Callable[[Any], Any]) -> ObjectiveResult:
        """Compute the loss inside of a step that computes its shards together."""
        try:
            return self.loss_of(micro, change)
        except Exception as error:
            error.add_note(position_note(micro, self.spec))
            raise

    def evaluation(self, team: Team) -> Evaluate | None:
        if not self.validation:
            return None
        how, config = self.evaluated, self.spec.config
        forward = _forward(team, self.module, self.call, self.device, config, how.batch_size)
        if config.limit_validation is not None or config.dry_run:
            limit = 1 if config.dry_run else config.limit_validation
            forward = replace(forward, most=(limit or 1) * config.first_batch)
        objective = self.objective if how.objective is None else _placed(how.objective, self.device)
        whole = _whole(how, config)

        def evaluate(info: StepInfo) -> tuple[dict[str, float], int]:
            found = evaluation.evaluate_sets(forward, objective, self.validation, info, whole)
            if objective is not self.objective:
                objective.check_unchanged()
            return found

        return evaluate


def build(job: TrainJob, stack: ExitStack, number: int, observers: Sequence[Observer] = ()) -> BuiltModel:
    """Build model, objective and data of a job, on the device of worker `number`."""
    config = job.config
    device = process_setup.choose_device(config, number)
    module = process_setup.build_model(job.model, config.seed).to(device).train()
    refuse_wrapped(module)
    objective = _placed(job.objective, device)
    stack.enter_context(process_setup.recomputing(module, config.activation_checkpointing))
    call = stack.enter_context(compiled(module, config))
    data = as_source(job.train)
    spec = RunSpec(
        module,
        job.optimizer,
        config,
        data,
        job.callbacks,
        job.folder,
        observers,
        job.aggregation,
        job.scheduler,
    )
    sets = {name: as_source(one) for name, one in job.evaluation.sets.items()}
    if job.validation is not None:
        sets = {"": as_source(job.validation), **sets}
    built = BuiltModel(module, call, objective, device, spec, job.evaluation, sets)
    return replace(built, spec=replace(spec, score=built.loss_together))


def new_team(
    context: DistributedContext,
    config: TrainConfig,
    announce: Callable[[DistributedContext], None] | None = None,
) -> Team:
    shards = config.chosen_shards if config.mode == "exact" else None
    return Team(context, shards, announce=announce)


Rejoin = Callable[[BaseException | None], None]
"""Installs another group after a failure (the error) or an agreed pause (None), and returns in it."""


def train_to_end(run: Run, built: BuiltModel, rejoin: Rejoin | None = None) -> None:
    """Drive a run through its steps and its conclusion, in one group after the other.

    `Run` raises GroupChangedError when its group has failed or a pause was agreed on. `rejoin` then has to
    return with three things done: the team has a context of the next group (`Team.install`), the run's state
    is bound to it (`RunState.rebind`), and it is that of the most advanced member (`RunState.synchronize`) or
    of a checkpoint (`resume.resume`). An open step continues with the shards that this rank still holds;
    duties continue after the last one that was done.
    """
    while True:
        try:
            train_steps(run, built)
            if run.conclude():
                return
        except GroupChangedError as change:
            if rejoin is None:
                raise
            rejoin(change.cause)


def conclude_again(run: Run, rejoin: Rejoin) -> bool:
    """Conclude a run whose group changed after its end. False: the group went back to a checkpoint, so that
    steps have to be done again."""
    while True:
        try:
            return run.conclude()
        except GroupChangedError as change:
            rejoin(change.cause)


def train_steps(run: Run, built: BuiltModel) -> None:
    """Run the training loop: one micro-batch after the other."""
    objective, checked = built.objective, False
    with inside_a_run(), profiled(run):
        for micro in run.microbatches():
            try:
                compute(run, built, micro)
                if not checked:
                    objective.check_unchanged()
                    checked = True
            except Exception as error:
                error.add_note(position_note(micro, built.spec))
                if is_out_of_memory(error):
                    error.add_note(
                        'try: micro_batch="auto", which finds the largest micro-batch that fits before the '
                        "first step, or a smaller one by hand"
                    )
                raise
        objective.check_unchanged()


def compute(run: Run, built: BuiltModel, micro: MicroBatch) -> Tensor:
    """Compute forward and backward of one micro-batch; return its loss, detached."""
    scored = run.taken(micro) or built.loss_of(micro, run.parts.callbacks.change_batch)
    run.backward(scored.loss, scored.metrics)
    return scored.loss.detach()


def train(context: DistributedContext, job: TrainJob) -> TrainResult:
    """Train on this rank, together with the others of the context."""
    config = job.config
    if job.process is not None:
        job.process.apply()
    stop = StopRequest(job.stop_file)
    with ExitStack() as stack:
        ours = job.stop_file is not None  # the process was started for this run
        stack.enter_context(listening(stop.ask, to_the_end=ours, ctrl_c=not ours))
        stack.enter_context(process_setup.prepared(config))
        started = time.perf_counter()
        shown = job.display if config.progress and context.is_master else None
        observers = [] if shown is None else [stack.enter_context(shown())]
        built = build(job, stack, context.rank, observers)
        team = new_team(context, config)
        builder = stack.enter_context(RunBuilder(team, built.spec, built.device, stop))
        run = builder.run(built.evaluation(team))
        if context.is_master:
            run.parts.callbacks.notify(Observer.on_start, builder.info(run))
        try:
            with one_group():
                train_to_end(run, built)
                history = conclude(run, started)
        except BaseException as error:
            if isinstance(error, Exception):
                save_unsupervised(run, error)
            if context.is_master:
                run.parts.callbacks.failed(error)
            raise
        return trained(run, built.module, history)


def trained(run: Run, module: nn.Module, history: History | None) -> TrainResult:
    """Return what this worker sends back."""
    stopped = run.state.ended if run.state.stopped_on_request else None
    averages = weight_averages.finished(run.parts.callbacks.modifiers, module)
    if run.state.restored is not None:
        run.state.best.restore()
    if history is None:
        return TrainResult(None, {}, stopped)
    weights = {name: tensor.detach().cpu() for name, tensor in model_tensors(module).items()}
    return TrainResult(history, weights, stopped, averages)


def find_micro_batch(context: DistributedContext, job: TrainJob) -> int:
    """Return the largest micro-batch that fits on every rank. All try at once: they may share a GPU."""
    if job.process is not None:
        job.process.apply()
    with ExitStack() as stack:
        stack.enter_context(process_setup.prepared(job.config))
        built = build(job, stack, context.rank)
        change = Callbacks(job.callbacks).change_batch
        Unfreezing(built.module, job.config.unfreeze)  # the steps that need the most memory come later
        context.barrier()
        size = find_for_run(
            job.config, built.module, built.call, built.objective, built.spec.data, built.device, change
        )
        return int(min(context.all_gather(size)))


def evaluate(context: DistributedContext, job: TrainJob) -> dict[str, float]:
    """Return loss and metrics of the model on `job.train`."""
    with _passing(context, job) as forward:
        how = job.evaluation
        objective = _placed(how.objective or job.objective, forward.device)
        whole = _whole(how, job.config)
        found = evaluation.evaluate(forward, objective, as_source(job.train), job.info, whole)[0]
        objective.check_unchanged()
        return found


def predict(context: DistributedContext, job: TrainJob) -> Any:
    """Return the model's outputs for `job.train`, on the main rank."""
    with _passing(context, job) as forward:
        return evaluation.predict(forward, as_source(job.train))


@contextmanager
def _passing(context: DistributedContext, job: TrainJob) -> Iterator[Forward]:
    """Yield the model of a job on this rank's device, for a pass over data."""
    config = job.config
    with process_setup.prepared(config):
        device = process_setup.choose_device(config, context.rank)
        module = process_setup.build_model(job.model, config.seed).to(device)
        with compiled(module, config) as call:
            yield _forward(Team(context, None), module, call, device, config, job.evaluation.batch_size)


def _placed(objective: Callable[..., Any], device: torch.device) -> Objective:
    placed = Objective(objective)
    placed.to(device)
    return placed


def _whole(how: EvaluationConfig, config: TrainConfig) -> WholeSetMetrics | None:
    return WholeSetMetrics(how, config.seed) if how.metrics else None


def _forward(
    team: Team,
    module: nn.Module,
    call: Callable[..., Any],
    device: torch.device,
    config: TrainConfig,
    batch: int | None = None,
) -> Forward:
    batch = batch or config.micro_samples or -(-config.first_batch // config.chosen_shards)
    return Forward(team, module, call, device, config.precision, config.seed, batch)


def position_note(micro: MicroBatch, spec: RunSpec) -> str:
    step = micro.step + 1  # as in the journal: the number that it would have had
    text = f"in epoch {micro.epoch}, step {step}, shard {micro.shard}, a micro-batch of {micro.count}"
    batch, size = spec.config.first_batch, spec.data.size
    alone = micro.count == 1 and batch > 1 and spec.config.dynamic_batch is None
    if alone and size is not None and size % batch:
        shards = counted(spec.config.chosen_shards, "shard")
        text += (
            f"\nthe last batch of an epoch holds {size} % {batch} = {counted(size % batch, 'sample')}, cut "
            f"into {shards}; where one sample is too few (BatchNorm), use drop_last=True or another "
            "global_batch"
        )
    return text
