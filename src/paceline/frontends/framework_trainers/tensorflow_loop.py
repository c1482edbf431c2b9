"""The loop of TensorFlowDistributedTrainer: the strategy trains, Paceline keeps the record.

    in step     MirroredStrategy, MultiWorkerMirroredStrategy: every worker makes every step
    handed out  ParameterServerStrategy: the chief hands each batch to a worker that is free; a worker that is
                lost has its batch handed to another, and the rest go on; the chief ends without a server,
                and without any worker

Under `paceline run` a job in step is started again when a worker is lost, from the newest version that
verifies. A signal that asks to stop is a number beside the figures of a step: all workers end after that
step, and it is saved. Workers of parameter servers end with their chief.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import numpy as np

from paceline.data.batch_plan import DataPosition
from paceline.frontends import launcher_link
from paceline.frontends.framework_trainers.chief_decisions import decided_by_chief
from paceline.frontends.framework_trainers.framework_ending import RunEnding
from paceline.frontends.framework_trainers.framework_run import FrameworkRun, FrameworkWorker, WorkerLoss
from paceline.frontends.framework_trainers.handed_out_steps import HandedOutSteps
from paceline.frontends.framework_trainers.tensorflow_data import EpochDataset, sizes_of
from paceline.frontends.framework_trainers.tensorflow_state import KerasState
from paceline.frontends.framework_trainers.tensorflow_steps import KerasSteps
from paceline.frontends.framework_trainers.tensorflow_strategy import TensorFlowJob
from paceline.train.callbacks import Modifier, Observer
from paceline.train.history import History
from paceline.train.settings.train_config import TrainConfig

_HANDED_ON: Final = WorkerLoss(
    phase="a step",
    reason="was lost",
    waiting="no rank waited for it",
    action="its batch is handed to another worker, and the others go on",
)
_AHEAD: Final = 2  # batches for each worker that are handed out before the first of them is done


@final
class TensorFlowLoop:
    """One `fit` in one process that trains or hands out."""

    def __init__(
        self,
        job: TensorFlowJob,
        steps: KerasSteps,
        state: KerasState,
        data: EpochDataset,
        validation: EpochDataset | None,
        config: TrainConfig,
        callbacks: tuple[Observer | Modifier, ...],
    ) -> None:
        self._job, self._steps, self._state = job, steps, state
        self._data, self._validation = data, validation
        self._config, self._callbacks = config, callbacks
        self._position = DataPosition()
        self._run: FrameworkRun | None = None
        self._rate = 0.0
        self._ending = RunEnding(config)

    def run(self) -> History:
        """Train to the end; every worker returns the chief's history, or raises it with the signal that
        stopped the run."""
        return self._ending.run(lambda: self._run, self._train)

    def _train(self) -> History:
        self._meet()
        while not self._ending.is_over(self._position):
            self._epoch()
        return self._finish()

    # -- meeting

    def _meet(self) -> None:
        job, group = self._job, self._job.group
        group.agree(
            {
                "epochs": self._config.epochs,
                "max_steps": self._config.max_steps,
                "the number of weights": self._state.weights,
                **sizes_of(self._data, "training"),
                **sizes_of(self._validation, "validation"),
            }
        )
        processes = group.processes() if job.coordinator is None else self._served_processes()
        found = decided_by_chief(lambda: self._open(processes), group.is_chief, group.broadcast_plain)
        if job.served is not None:
            job.served.fitting()
        if found is None:
            return
        self._position = DataPosition(**found)
        payload = b""
        if self._run is not None and self._run.resumed is not None:
            payload = self._state.to_bytes(self._state.arrays_of(self._run.resumed))
        self._state.assign(self._state.from_bytes(group.broadcast(payload)))
        if self._run is not None:
            self._run.start_clock()

    def _open(self, processes: tuple[FrameworkWorker, ...]) -> dict[str, int] | None:
        """Open the run on the chief; return the position of the version that it goes on from."""
        losses = launcher_link.losses_before_restart()
        self._run = run = FrameworkRun.open(self._config, self._job.framework, self._callbacks)
        steps = self._data.steps
        if run.resumed is not None:
            self._state.arrays_of(run.resumed)  # refused before anything is written
        run.start(
            processes,
            self._state.contents,
            replicas=self._job.replicas,
            total_steps=None if steps is None else steps * (run.config.epochs or 1),
        )
        version = None if run.resumed is None else run.resumed.version
        for loss in losses:
            gone = WorkerLoss(
                phase="a step",
                reason=loss.how,
                waiting="the other workers waited in the all-reduce",
                action="all workers were started again, "
                + ("from the beginning" if version is None else f"from version {version}, which verified"),
            )
            run.lost([FrameworkWorker(loss.rank, loss.pid, loss.host)], gone, loss.when)
        return None if run.resumed is None else dict(vars(run.position))

    def _served_processes(self) -> tuple[FrameworkWorker, ...]:
        cluster = self._job.cluster
        if cluster is None or not cluster.processes:
            return self._job.group.processes()
        return cluster.processes[1 + len(cluster.jobs["ps"]) :]

    # -- training

    def _epoch(self) -> None:
        self._rate = self._learning_rate()
        batches = self._data.of_epoch(self._position.epoch, self._position.offset)
        train = self._handed_out if self._job.coordinator is not None else self._in_step
        train(batches)
        if self._ending.leaves_epoch(self._position, batches):
            return
        self._evaluate()
        self._position = self._position.next_epoch()
        if self._run is not None:
            self._run.end_epoch()

    def _in_step(self, batches: Iterator[Any]) -> None:
        for batch in batches:
            *figures, asked = self._steps.train(batch, self._asked()).numpy()
            self._record(figures)
            self._ending.agree(asked)
            if self._ending.ends_after(self._position.step):
                return

    def _handed_out(self, batches: Iterator[Any]) -> None:
        """Hand batches to workers; nothing is under way when a version is due, so that it holds whole
        steps."""
        ahead, every = _AHEAD * max(1, self._job.replicas), self._config.checkpoint.every_steps

        def record(left: int) -> None:
            while len(under_way) > left:
                self._record(under_way.take())

        with HandedOutSteps(self._job.coordinator, self._job.served) as under_way:
            for batch in batches:
                under_way.hand_out(self._steps.train, batch, self._asked())
                made = self._position.step + len(under_way)
                due = every is not None and made % every == 0
                self._ending.agree(self._ending.asked())
                over = self._ending.ends_after(made)
                record(0 if due or over else ahead)
                self._note_losses()
                if over:
                    return
            record(0)

    def _asked(self) -> Any:
        return self._job.tf.constant(self._ending.asked(), self._job.tf.float64)

    def _record(self, figures: Any) -> None:
        loss, samples = float(figures[0]), int(figures[1])
        self._position = self._position.after(1, samples)
        if self._run is not None:
            if self._job.coordinator is None:
                self._rate = self._learning_rate()
            self._run.step(
                loss=loss / samples if samples else 0.0, samples=samples, learning_rate=self._rate, taken=1
            )

    def _note_losses(self) -> None:
        served, cluster = self._job.served, self._job.cluster
        if served is None or cluster is None or self._run is None:
            return
        for rank in served.take_lost():
            self._run.lost([cluster.processes[rank]], _HANDED_ON)
            self._run.workers = tuple(one for one in self._run.workers if one.rank != rank)

    def _learning_rate(self) -> float:
        if self._run is None:
            return 0.0
        return float(np.asarray(self._state.model.optimizer.learning_rate))

    def _evaluate(self) -> None:
        if self._validation is None:
            return
        started = time.perf_counter()
        metrics, samples = measured(self._job, self._steps, self._validation)
        if self._run is not None:
            self._run.evaluated(metrics, samples, time.perf_counter() - started)

    # -- the end

    def _finish(self) -> History:
        run, group = self._run, self._job.group
        if run is not None:
            run.stopped = self._ending.reason(self._position)

        def finish() -> dict[str, Any]:
            assert run is not None
            return run.finish(self._state.hash()).to_dict()

        ended = decided_by_chief(finish, group.is_chief, group.broadcast_plain)
        if self._job.served is not None:
            self._job.served.fitted()
        return History.from_dict(ended)


def measured(job: TensorFlowJob, steps: KerasSteps, data: EpochDataset) -> tuple[dict[str, float], int]:
    """Return loss and metrics over a dataset, and its samples. The chief of parameter servers evaluates by
    itself, with their variables."""
    steps.reset()
    score: Callable[[Any], Any] = steps.score if job.coordinator is None else steps.score_here
    total = np.zeros(2)
    for batch in data.of_epoch(0, 0):
        total = total + np.asarray(score(batch).numpy())
    loss, samples = float(total[0]), int(total[1])
    return {"loss": loss / samples if samples else 0.0, **with_accuracy(steps.metrics())}, samples


def with_accuracy(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics with the only accuracy among them as "accuracy" too, which the history's best one is
    of. A metric object, and one of several outputs, has a longer name."""
    named = [name for name in metrics if name == "acc" or (name.endswith("accuracy") and "top_k" not in name)]
    return metrics if len(named) != 1 else {**metrics, "accuracy": metrics[named[0]]}
