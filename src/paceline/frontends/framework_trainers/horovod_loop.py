"""The loop of HorovodTrainer on one rank: Horovod sums the gradients, Paceline keeps the record.

    meet      ranks agree on what they train; the chief opens the run, or continues it, and shares its state
    step      forward, backward while Horovod sums, update; the step's figures travel with the gradients, and
              whether a signal asked a rank to stop: then all ranks end after that step, and it is saved
    commit    under elastic Horovod: a copy in memory that survivors go back to when a rank is lost

What happens after a loss is Horovod's: it calls `train` again with the ranks that are left, in another order
perhaps, and the first of them is the chief from then on.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.data.seeding import seed_everything, set_aside
from paceline.frontends.framework_trainers.framework_ending import RunEnding
from paceline.frontends.framework_trainers.framework_run import FrameworkRun, FrameworkWorker, WorkerLoss
from paceline.frontends.framework_trainers.horovod_data import RankBatches
from paceline.frontends.framework_trainers.horovod_job import HorovodJob
from paceline.frontends.framework_trainers.horovod_state import (
    HorovodProgress,
    HorovodState,
    from_plain,
    plain,
)
from paceline.train.callbacks import Modifier, Observer
from paceline.train.history import History
from paceline.train.objective import Objective
from paceline.train.settings.train_config import TrainConfig
from paceline.train.step_info import StepInfo

_LOST = WorkerLoss(
    phase="the all-reduce",
    reason="was lost",
    waiting="the other ranks waited for its gradients",
    action="Horovod goes on with the ranks that are left, from the last commit",
)


# What draws: the beginning of an epoch (seeds of a loader's workers), reading, computing, evaluating.
_OPENING, _READING, _COMPUTING, _EVALUATING = range(4)


@final
@dataclass(frozen=True)
class LoopSettings:
    """What a rank needs besides its state. `commit_steps`: steps between two copies in memory under elastic
    Horovod; `passes`: forward passes of a step."""

    config: TrainConfig
    commit_steps: int
    passes: int = 1
    clipping: float | None = None
    callbacks: tuple[Observer | Modifier, ...] = ()


@final
class HorovodLoop:
    """One `fit` on one rank."""

    def __init__(
        self,
        job: HorovodJob,
        state: HorovodState,
        objective: Objective,
        batches: RankBatches,
        validation: RankBatches | None,
        settings: LoopSettings,
    ) -> None:
        self._job, self._state, self._objective = job, state, objective
        self._batches, self._validation, self._settings = batches, validation, settings
        self._progress = HorovodProgress(scaled_for=state.scaled_for)
        self._run: FrameworkRun | None = None
        self._workers: list[FrameworkWorker] = []
        self._noticed: float | None = None  # when a collective failed, on time.perf_counter
        self._ending = RunEnding(settings.config)

    def run(self) -> History:
        """Train to the end, through losses of ranks where Horovod is elastic; every rank returns the chief's
        history, or raises it with the signal that stopped the run."""
        self._progress.seed = int(torch.empty((), dtype=torch.int64).random_())  # the chief's counts
        train = self._train_elastic if self._job.is_elastic else self._train
        with set_aside():
            return self._ending.run(lambda: self._run, train)

    def _train_elastic(self) -> History:
        hvd = self._job.hvd
        kept = hvd.elastic.TorchState(
            model=self._state.module, optimizer=self._state.distributed, progress=plain(self._progress)
        )

        def train(kept: Any) -> History:
            self._progress = from_plain(kept.progress)

            def commit() -> None:
                kept.progress = plain(self._progress)
                kept.commit()

            try:
                return self._train(commit)
            except Exception:
                self._noticed = time.perf_counter()  # Horovod decides what it was, and calls again
                raise

        ended: History = hvd.elastic.run(train)(kept)
        return ended

    # -- meeting

    def _meet(self) -> None:
        """Agree with the ranks that are there now, and go on from what they hold."""
        job, config = self._job, self._settings.config
        if self._run is not None and not job.is_chief:
            self._run.abandon()  # before the chief opens the folder, which comes after the next collective
            self._run = None
        before, self._workers = self._workers, job.workers()
        job.agree(
            {
                "epochs": config.epochs,
                "max_steps": config.max_steps,
                "samples": self._batches.samples,
                "batches": self._batches.steps,
                "batch size": self._batches.batch,
                "validation data": _kind_of(self._validation),
                "gradient_accumulation_steps": self._settings.passes,
                "gradient_clipping": self._settings.clipping,
                "commit_steps": self._settings.commit_steps,
                **self._state.terms(),
            }
        )
        job.decided_by_chief(lambda: self._open(before))
        # Also to ranks that join: Horovod shares weights first, and then steps a new optimizer once.
        self._progress = self._state.share(job.hvd, self._progress)
        self._state.scale(self._progress, job.size)
        if self._run is not None:
            self._run.start_clock()

    def _open(self, before: Sequence[FrameworkWorker]) -> None:
        """Open the run on the chief, or continue it after ranks came or were lost.

        A rank that is lost while the ranks meet takes them back to before: the chief then has a run already
        of which the progress does not know yet; a new chief begins it anew, as no step of it was made.
        """
        settings, progress, framework = self._settings, self._progress, self._job.framework
        run, known = self._run, progress.folder
        if run is None and known:
            run = FrameworkRun.take_over(
                known, settings.config, framework, settings.callbacks, progress.position
            )
        elif run is None:
            run = FrameworkRun.open(settings.config, framework, settings.callbacks)
        self._run = run
        if not known:
            progress.folder, progress.position = str(run.folder.path), run.position
            if run.resumed is not None:
                self._state.load(run.resumed, progress, own_data=self._batches.is_own)
        here = {(one.host, one.pid) for one in self._workers}
        gone = [one for one in run.workers or before if (one.host, one.pid) not in here]
        run.lost(gone, _LOST, self._noticed)
        if run.workers:
            run.regroup(progress.position, self._workers)
            return
        steps = self._batches.steps
        run.start(
            self._workers,
            lambda: self._state.contents(self._progress),
            samples=self._batches.samples,
            total_steps=None if steps is None else steps * (settings.config.epochs or 1),
            continued=bool(known),
        )

    # -- training

    def _train(self, commit: Callable[[], None] = lambda: None) -> History:
        # A rank lost in a step may leave only some of the others with its figures: the next step asks again.
        self._ending.is_stopping = False
        self._meet()
        commit()  # what the ranks have met on: the run's folder, a version's weights, the scaled rate
        chief, ending = self._run, self._ending
        while not ending.is_over(self._progress.position):
            groups = self._groups(self._progress.position.epoch)
            for number, group in enumerate(groups):
                self._step(group)
                if (number + 1) % self._settings.commit_steps == 0:
                    commit()
                if ending.ends_after(self._progress.position.step):
                    break
            if ending.leaves_epoch(self._progress.position, groups):
                break
            self._evaluate()
            self._progress.turn_epoch()
            if chief is not None:
                chief.end_epoch()
            commit()
        if chief is not None:
            chief.stopped = ending.reason(self._progress.position)
        return self._finish()

    def _groups(self, epoch: int) -> Iterator[list[tuple[Any, int]]]:
        """Yield the batches of each step, as many as it has forward passes, and their samples."""
        progress = self._progress
        self._seed(_OPENING, epoch)
        batches = self._batches.of_epoch(epoch, progress.position.offset, progress.batches)
        while True:
            self._seed(_READING, progress.position.step)
            group = list(itertools.islice(batches, self._settings.passes))
            if not group:
                return
            yield group

    def _seed(self, what: int, number: int) -> None:
        """Seed the generators with what is done next: a run that resumes there draws the same numbers."""
        seed_everything(self._progress.seed, what, number, self._job.rank)

    def _step(self, group: Sequence[tuple[Any, int]]) -> None:
        hvd, optimizer, module = self._job.hvd, self._state.distributed, self._state.module
        position = self._progress.position
        info = StepInfo(step=position.step, epoch=position.epoch)
        self._seed(_COMPUTING, position.step)
        module.train()
        optimizer.zero_grad()
        figures: list[tuple[int, Tensor, dict[str, float]]] = []
        for batch, count in group:
            scored = self._objective.score(module, batch, info)
            (scored.loss / len(group)).backward()  # type: ignore[no-untyped-call]
            numbers = {name: float(value) for name, value in scored.metrics.items()}
            figures.append((count, scored.loss.detach(), numbers))
        asked = torch.tensor([self._ending.asked()], dtype=torch.float64)
        sums = torch.cat([asked, _summed(figures)])
        handle = hvd.allreduce_async_(sums, name="paceline.step", op=hvd.Sum)
        if self._settings.clipping is None:
            optimizer.step()
        else:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(module.parameters(), self._settings.clipping)
            with optimizer.skip_synchronize():
                optimizer.step()
        ranks_asked, samples, loss, *rest = hvd.synchronize(handle).tolist()
        self._ending.agree(ranks_asked)
        self._progress.pass_batches(len(group), int(samples))
        if self._run is not None:
            names = sorted(figures[0][2])
            self._run.step(
                loss=loss / samples,
                samples=int(samples),
                learning_rate=float(optimizer.param_groups[0]["lr"]),
                metrics={name: value / samples for name, value in zip(names, rest, strict=True)},
            )

    def _evaluate(self) -> None:
        """Evaluate on the validation data, every rank on its share."""
        if self._validation is None:
            return
        started, module = time.perf_counter(), self._state.module
        position = self._progress.position
        info = StepInfo(step=position.step, epoch=position.epoch)
        figures: list[tuple[int, Tensor, dict[str, float]]] = []
        self._seed(_EVALUATING, position.step)
        module.eval()
        with torch.no_grad():
            for batch, count in self._validation.of_epoch(0, 0):
                scored = self._objective.evaluate(module, batch, info)
                numbers = {name: float(value) for name, value in scored.metrics.items()}
                figures.append((count, scored.loss.detach(), numbers))
        hvd = self._job.hvd
        total = hvd.allreduce(_summed(figures), name="paceline.evaluation", op=hvd.Sum).tolist()
        samples, loss, *rest = total
        if self._run is not None:
            means = {name: value / samples for name, value in zip(sorted(figures[0][2]), rest, strict=True)}
            seconds = time.perf_counter() - started
            self._run.evaluated({"loss": loss / samples, **means}, int(samples), seconds)

    # -- the end

    def _finish(self) -> History:
        run, digest = self._run, self._state.hash()
        history = self._job.decided_by_chief(lambda: None if run is None else run.finish(digest))
        assert history is not None
        return history


def _summed(figures: Sequence[tuple[int, Tensor, dict[str, float]]]) -> Tensor:
    """Return samples, loss and metrics of batches, each as a sum over the samples."""
    names = sorted(figures[0][2])
    rows = [
        [float(count), float(loss) * count, *(numbers[name] * count for name in names)]
        for count, loss, numbers in figures
    ]
    return torch.tensor(rows, dtype=torch.float64).sum(0)


def _kind_of(validation: RankBatches | None) -> str:
    """Return how the ranks evaluate: those that do not know the number of their batches count as they go."""
    if validation is None:
        return "none"
    return "given" if validation.steps is not None else "given, of unknown length"
