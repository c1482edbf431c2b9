"""`paceline.HorovodTrainer`: a torch model trained by Horovod, with Paceline's checkpoints and record.

    horovodrun -np 2 --gloo python train.py
    horovodrun -np 2 --min-np 1 --host-discovery-script hosts.sh --gloo python train.py        elastic

Horovod sums the gradients, in its own order: the result depends on the number of ranks, as it does without
Paceline. What Paceline adds: versions that verify, resume, trackers, the journal with a verdict for every
lost rank, and `History`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.frontends.announcements import announce, speaking_as
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.framework_trainers.framework_settings import (
    FrameworkSettings,
    GivenConfig,
    progress_shown,
)
from paceline.frontends.framework_trainers.horovod_job import HorovodJob
from paceline.frontends.run_preparation import check_model, check_optimizer
from paceline.train.callbacks import Modifier, Observer, as_list, refuse_inside
from paceline.train.settings.keyword_hints import explained

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from paceline.frontends.framework_trainers.horovod_state import HorovodState, RateRule
    from paceline.train.history import History

_HINTS = {
    "epochs": "give it to fit: trainer.fit(train_loader, epochs=...)",
    "num_gpus": "horovodrun decides: horovodrun -np N",
    "workers": "horovodrun decides: horovodrun -np N",
    "batch_size": "it is the DataLoader's, of one rank",
    "learning_rate": "give an optimizer, or config=DistributedConfig(learning_rate=...)",
    "lr": "give an optimizer, or config=DistributedConfig(learning_rate=...)",
    "run_dir": "use checkpoint_dir=...",
    "resume": "use resume_from_checkpoint=True",
}
_OTHERWISE = {
    "mixed_precision": 'what travels can be fp16: compression="fp16"',
    "communication_backend": "Horovod chooses: horovodrun --gloo, or --mpi",
    "find_unused_parameters": "leave it out: Horovod sums what has a gradient",
}


@explained(hints=_HINTS)
@final
class HorovodTrainer:
    """A model that Horovod trains on the ranks of horovodrun; without horovodrun on one.

        trainer = paceline.HorovodTrainer(model, torch.optim.SGD(model.parameters(), lr=0.01))
        history = trainer.fit(train_loader, epochs=3)

    optimizer      an optimizer, or a function of the parameters; None: AdamW with the config's learning_rate
    loss_fn        a loss of (output, target), or an objective (model, batch); None: chosen by the targets
    compression    of gradients that travel: None or "none", "fp16", or one of hvd.Compression
    lr_rule        how the learning rate grows with the ranks: "linear", "sqrt" or "none"
    commit_steps   elastic Horovod: steps between two copies in memory, which survivors go back to
    timeline       a file for Horovod's timeline
    config         a DistributedConfig or its file: epochs, learning_rate, gradient_clipping, checkpoints, ...
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Optimizer | Callable[..., Optimizer] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        verbose: bool | int = True,
        compression: Any = None,
        *,
        lr_rule: RateRule = "linear",
        commit_steps: int = 10,
        timeline: str | os.PathLike[str] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume_from_checkpoint: bool = False,
        config: GivenConfig = None,
        callbacks: Sequence[Observer | Modifier] = (),
    ) -> None:
        check_model(model)
        if optimizer is not None:
            check_optimizer(optimizer, "give an optimizer, or a function: lambda p: torch.optim.SGD(p, 0.01)")
        if lr_rule not in ("linear", "sqrt", "none"):
            raise UsageError(f"lr_rule={lr_rule!r} is no rule", remedy='use "linear", "sqrt" or "none"')
        if not isinstance(commit_steps, int) or commit_steps < 1:
            raise UsageError(f"commit_steps={commit_steps!r}: it counts steps", remedy="give 1 or more")
        self._settings = FrameworkSettings(
            config, "horovod", checkpoint_dir=checkpoint_dir, resume=resume_from_checkpoint
        )
        self._settings.refuse(_OTHERWISE)
        self._job = HorovodJob(timeline=timeline is not None)
        self._compression = _compression(self._job.hvd, compression)
        self._model, self._optimizer, self._loss = model, optimizer, loss_fn
        self.model: nn.Module = _built(model).to(self._job.device)
        self._rule, self._commit_steps, self._timeline = lr_rule, commit_steps, timeline
        self._callbacks, self._verbose = as_list(callbacks), bool(verbose)
        self._averages = 0
        self._state: HorovodState | None = None
        self.history: History | None = None

    @property
    def rank(self) -> int:
        """This process's rank in Horovod's job."""
        return self._job.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._job.size

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of the last `fit` on validation data."""
        return None if self.history is None else self.history.best_accuracy

    def metric_average(self, value: Any, name: str | None = None) -> float:
        """Return the mean of a number over all ranks, each of which calls this with its own. `name` tells
        numbers apart that ranks do not average in the same order."""
        import torch

        number = torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1)
        if number.numel() != 1:
            raise UsageError(
                f"metric_average: a value of {number.numel()} numbers", remedy="average one number at a time"
            )
        self._averages += 1
        label = f"paceline.metric.{name or self._averages}"
        return float(self._job.hvd.allreduce(number.cpu(), name=label))

    @folding_errors
    def fit(self, train_loader: Any, epochs: int | None = None, val_loader: Any = None) -> History:
        """Train to the last epoch; return the history, the same on every rank.

        A DataLoader is taken as its dataset and batch size: every rank gets its share of each epoch. Its
        batch size counts the samples of one rank.
        """
        refuse_inside("fit")
        import torch

        from paceline.frontends.framework_trainers.horovod_data import RankBatches
        from paceline.frontends.framework_trainers.horovod_loop import HorovodLoop, LoopSettings
        from paceline.frontends.framework_trainers.horovod_state import HorovodState

        job, distributed = self._job, self._settings.config
        if job.device.type == "cuda":
            torch.cuda.set_device(job.device)  # what the caller's code and Horovod allocate is there, too
        with speaking_as(is_first=job.is_chief):
            batches = RankBatches(job, train_loader)
            validation = (
                None
                if val_loader is None
                else RankBatches(job, val_loader, "the validation data", shuffle=False)
            )
            passes = distributed.gradient_accumulation_steps
            config = self._settings.train_config(job.size, batches.batch, epochs)
            objective = self._objective(batches)
            if self._state is None:
                self._state = HorovodState(self.model, self._made_optimizer(), self._rule)
            if self._rule != "none" and job.size > 1:
                announce(f"the learning rate is scaled by Horovod's {job.size} ranks: {self._rule}")
            summing = self._state.summing(job.hvd, self._compression, passes, elastic=job.is_elastic)
        with summing, self._traced(), progress_shown(self._verbose) as shown:
            callbacks = (*self._callbacks, *self._settings.trackers(), *shown)
            settings = LoopSettings(config, self._commit_steps, passes, config.clip_norm, callbacks)
            loop = HorovodLoop(job, self._state, objective, batches, validation, settings)
            self.history = loop.run()
        return self.history

    # inside

    def _objective(self, batches: Any) -> Any:
        from paceline.frontends.chosen_parts import objective_for
        from paceline.train.objective import Objective, split_pair

        objective = Objective(objective_for(self._loss, lambda: split_pair(batches.first)[1]))
        objective.to(self._job.device)
        return objective

    def _made_optimizer(self) -> Any:
        from paceline.frontends.loss_inference import default_optimizer
        from paceline.train.state import optimizers

        rate, given = self._settings.config.learning_rate, self._optimizer
        if given is None:
            announce(f"no optimizer: AdamW with learning_rate {rate:g}")
        made = optimizers.build(default_optimizer(rate) if given is None else given, self.model)
        if len(made) != 1:
            raise UsageError(
                f"{len(made)} optimizers: Horovod's step is that of one",
                remedy="give one optimizer with several parameter groups",
            )
        return made[0]

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Write Horovod's timeline while it trains, on the first rank, which has it for all."""
        if self._timeline is None:
            yield
            return
        hvd = self._job.hvd
        hvd.start_timeline(os.fspath(self._timeline), mark_cycles=False)
        try:
            yield
        finally:
            if hvd.is_initialized():
                hvd.stop_timeline()


def _built(model: Any) -> nn.Module:
    from torch import nn

    made = model if isinstance(model, nn.Module) else model()
    if not isinstance(made, nn.Module):
        raise UsageError(
            f"the function that builds the model returned {with_article(made)}",
            remedy="return a torch.nn.Module",
        )
    return made


def _compression(hvd: Any, given: Any) -> Any:
    known = {None: hvd.Compression.none, "none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
    if given is None or isinstance(given, str):
        if given not in known:
            raise UsageError(
                f"compression={given!r} is unknown",
                remedy='use None, "none", "fp16", or one of hvd.Compression',
            )
        return known[given]
    if not (hasattr(given, "compress") and hasattr(given, "decompress")):
        raise UsageError(
            f"compression is {with_article(given)}", remedy='use None, "none", "fp16", or hvd.Compression.*'
        )
    return given
