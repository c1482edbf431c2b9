"""`paceline.Trainer`: train, evaluate and predict on many workers with the result of one.

Called from a plain script or a notebook it starts the workers; inside a job that is already started (a
spawned function, torchrun, `init_process_group`) it joins. What a worker does is in train/; here is only how
a run is prepared, started and handed back. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from paceline.core.errors import UsageError
from paceline.frontends.joining import cores, prepare, running_job
from paceline.frontends.spawn import spawn
from paceline.train.callbacks import Callbacks, Modifier, Observer
from paceline.train.checks import check
from paceline.train.config import TrainConfig
from paceline.train.signals import Stopped, leave_request, listening

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

    from paceline.comm.context import DistributedContext
    from paceline.train.history import History
    from paceline.train.optimizers import OptimizerFactory
    from paceline.train.worker import TrainJob

T = TypeVar("T")
_STOP_FILE = "stop"
_PRELOAD = ("paceline.train.worker",)


@final
class Trainer:
    """A model, what it is to learn, and how.

        trainer = paceline.Trainer(model, objective, optimizer=lambda p: torch.optim.AdamW(p, 1e-3),
                                   config=paceline.TrainConfig(workers=4, global_batch=256, epochs=3))
        history = trainer.fit(train_data, val_data)

    model       a module, or a function that builds one (with randomness from the run's seed)
    objective   a loss module (output, target), or a function (model, batch) -> loss or (loss, metrics)
    optimizer   a function from parameters (with names in `p.named`) to one or several optimizers
    callbacks   Observers and Modifiers

    After `fit` the caller's module holds the trained weights; one that was built is `trainer.model`.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        objective: Callable[..., Any],
        *,
        optimizer: OptimizerFactory | Optimizer | Sequence[Optimizer],
        config: TrainConfig | None = None,
        callbacks: Sequence[Observer | Modifier] = (),
    ) -> None:
        if not callable(model):
            raise UsageError(
                f"the model is a {type(model).__name__}",
                remedy="pass a torch.nn.Module or a function that builds one",
            )
        self.model = model
        self.objective = objective
        self.optimizer = optimizer
        self.config = config or TrainConfig()
        self.callbacks = tuple(callbacks)
        Callbacks(self.callbacks)  # refused here, before a worker starts

    def fit(self, train_data: Any, val_data: Any = None) -> History:
        """Trains to the end that the config names, or until told to stop, and returns what happened.

        SIGTERM and SIGUSR1 finish the step, save and raise `Stopped`, which ends the process with code 75.
        """
        from paceline.data.sources import as_source
        from paceline.train import worker
        from paceline.train.history import History
        from paceline.train.objective import Objective

        Objective(self.objective)
        source, validation = as_source(train_data), None if val_data is None else as_source(val_data)
        context = running_job()
        # Refused before a folder is made or a worker starts.
        check(self.config, samples=source.size, validation=validation is not None)
        config, folder = prepare(self.config, context)
        check(config, samples=source.size, validation=validation is not None)
        stop_file = folder.path / _STOP_FILE
        job = worker.TrainJob(
            model=self.model,
            objective=self.objective,
            optimizer=self.optimizer,
            config=config,
            train=source,
            validation=validation,
            callbacks=self.callbacks,
            folder=folder.path,
            stop_file=None if context is not None else stop_file,
        )
        if context is not None:
            trained = worker.train(context, job)
            done = History.from_dict(context.broadcast(trained.history and trained.history.to_dict()))
        else:
            with _forwarding_signals(stop_file):
                trained = self._spawn(worker.train, job)
            assert trained.history is not None
            done = trained.history
            self._take_weights(trained.weights)
        if trained.stopped is not None:
            raise Stopped(trained.stopped, done)
        return done

    def evaluate(self, data: Any) -> dict[str, float]:
        """Means of loss and metrics over the data, the same bits on any number of workers."""
        from paceline.train import worker

        return self._pass_over(worker.evaluate, data)

    def predict(self, data: Any) -> Any:
        """The model's outputs, in the order of the data."""
        from paceline.train import worker

        return self._pass_over(worker.predict, data)

    # inside

    def _pass_over(self, function: Callable[[DistributedContext, TrainJob], T], data: Any) -> T:
        from paceline.data.sources import as_source
        from paceline.train.worker import TrainJob

        context = running_job()
        workers = self.config.workers if context is None else context.world_size
        shards = self.config.shards or self.config.workers
        config = dataclasses.replace(self.config, shards=shards, workers=workers).resolved(cores())
        job = TrainJob(self.model, self.objective, None, config, as_source(data))
        return function(context, job) if context is not None else self._spawn(function, job)

    def _spawn(self, function: Callable[[DistributedContext, TrainJob], T], job: TrainJob) -> T:
        config = job.config
        results = spawn(
            function,
            job,
            workers=config.workers,
            threads=config.threads,
            comm_timeout=config.timeout,
            preload=_PRELOAD,
        )
        return results[0]

    def _take_weights(self, weights: dict[str, Any]) -> None:
        import torch
        from torch import nn

        from paceline.train.run_setup import build_model
        from paceline.train.state import model_tensors

        if not isinstance(self.model, nn.Module):
            self.model = build_model(self.model, self.config.seed)
        with torch.no_grad():
            for name, tensor in model_tensors(self.model).items():
                tensor.copy_(weights[name])


@contextmanager
def _forwarding_signals(stop_file: Path) -> Iterator[None]:
    """A signal to this process asks the workers, which look for the file after every step."""
    stop_file.unlink(missing_ok=True)
    with listening(lambda reason: leave_request(stop_file, reason)):
        yield
    stop_file.unlink(missing_ok=True)
