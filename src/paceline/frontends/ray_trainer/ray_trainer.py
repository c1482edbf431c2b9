"""`paceline.RayTrainer`: `Trainer` for users of Ray Train and Ray Tune.

One dict has the settings, as Tune hands it to a trial. Workers run on a Ray cluster, or inside a trial in the
trial's own share of it; a lost worker or node is repaired, and the result is the same bits as without.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from paceline.core.errors import UsageError
from paceline.engines.engine import Engine
from paceline.frontends.announcements import announce
from paceline.frontends.chosen_parts import objective_for
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.ray_trainer import model_export, trainer_settings
from paceline.frontends.ray_trainer.tune_report import TuneReport, current_trial
from paceline.frontends.run_preparation import check_model
from paceline.frontends.trainer import Trainer
from paceline.train.callbacks import Modifier, Observer, as_list
from paceline.train.settings.train_config import TrainConfig

if TYPE_CHECKING:
    from torch import nn

    from paceline.train.history import History

_USUAL_BATCH = 32


@final
class RayTrainer:
    """A model, trained on Ray with the settings of a dict.

        trainer = paceline.RayTrainer(build, {"lr": 1e-3, "batch_size": 64, "epochs": 3, "num_workers": 4})
        trainer.fit(train_loader, val_loader)
        trainer.best_accuracy

    model      a module, a function that builds one, or a function of the settings that does: build(config)
    config     lr, weight_decay, batch_size (samples of one step, of all workers together; None: the train
               loader's), epochs, num_workers, cpus_per_worker, use_gpu, address, any other setting of
               TrainConfig (seed, max_steps, run_dir, ...) but workers, global_batch and engine, which are
               refused, and anything else that the model wants to read
    optimizer  a function from parameters to an optimizer, or of (parameters, config); None: AdamW with lr
    loss_fn    a loss of (output, target), or an objective (model, batch); None: chosen by the targets
    scheduler  a function from the optimizer to a torch scheduler
    engine     a `paceline.Ray`; None: num_workers agents with a worker each, wherever Ray has room

    In a Ray Tune trial every epoch is reported to Tune, the last one with the exported model as checkpoint. A
    trial that was given bundles for agents (`engine.trial_resources()`) trains in them; another one trains
    with local workers beside itself. A trial that Tune starts again resumes.
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., nn.Module],
        config: Mapping[str, Any] | None = None,
        *,
        optimizer: Callable[..., Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        scheduler: Callable[..., Any] | None = None,
        engine: Engine | None = None,
        callbacks: Sequence[Observer | Modifier] = (),
    ) -> None:
        self.config = dict(config or {})
        self.settings = trainer_settings.read(self.config)
        self.model = _with_config(model, self.config)
        check_model(self.model)
        self.history: History | None = None
        self._optimizer = optimizer
        self._loss, self._scheduler, self._engine = loss_fn, scheduler, engine
        self._callbacks = as_list(callbacks)
        self._trainer: Trainer | None = None
        self._input_dtype: str | None = None

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of the last `fit`, on the validation data where there was any."""
        return None if self.history is None else self.history.best_accuracy

    @folding_errors
    def fit(self, train_loader: Any, val_loader: Any = None) -> History:
        """Train to the last epoch, and return the history."""
        from paceline.data.sources import as_source
        from paceline.frontends.loss_inference import first_targets

        source, trial = as_source(train_loader), current_trial()
        self._input_dtype = model_export.dtype_of_inputs(source)
        report = TuneReport(holds_last=True)
        self._trainer = Trainer(
            self.model,
            objective_for(self._loss, lambda: first_targets(source)),
            optimizer=self._optimizer_function(),
            scheduler=self._scheduler,
            config=self._train_config(getattr(train_loader, "batch_size", None), trial),
            callbacks=[*self._callbacks, *([] if trial is None else [report])],
        )
        self.history = self._trainer.fit(source, val_loader)
        self.model = self._trainer.model
        if trial is not None:
            with tempfile.TemporaryDirectory(prefix="paceline-export-") as folder:
                report.finish(self.export(folder))
        return self.history

    @folding_errors
    def evaluate(self, loader: Any) -> dict[str, float]:
        """Return the means of loss and metrics over the data, after `fit`."""
        return self._after_fit("evaluate").evaluate(loader)

    @folding_errors
    def predict(self, loader: Any) -> Any:
        """Return the model's outputs in the order of the data, after `fit`."""
        return self._after_fit("predict").predict(loader)

    @folding_errors
    def export(self, folder: str | Path) -> Path:
        """Write the trained model to a folder: for `RayTrainer.load`, `RayTrainer.serve`, a checkpoint."""
        from torch import nn

        module = self._after_fit("export").model
        assert isinstance(module, nn.Module)
        about = {
            model_export.INPUT_DTYPE: self._input_dtype,
            "config": self.config,
            "best_accuracy": self.best_accuracy,
        }
        return model_export.write(Path(folder), module, about)

    @staticmethod
    @folding_errors
    def load(folder: str | Path) -> nn.Module:
        """Return the module of an exported folder, verified. Runs code of the folder: load what you trust."""
        return model_export.load(folder)

    @staticmethod
    @folding_errors
    def serve(folder: str | Path, **options: Any) -> Any:
        """Return a Ray Serve application of an exported folder, for `ray.serve.run`; `options` are those of
        its deployment (num_replicas, ray_actor_options, ...)."""
        return model_export.serve_application(folder, **options)

    # inside

    def _train_config(self, loader_batch: int | None, trial: Path | None) -> TrainConfig:
        given, run = self.settings, dict(self.settings.run)
        if trial is not None:
            # A trial that Tune starts again finds its run there.
            run = {"run_dir": str(trial / "paceline"), "resume": "auto", "progress": False, **run}
        batch = given.batch_size or loader_batch or _USUAL_BATCH
        if loader_batch not in (None, batch):
            announce(f"batch_size {batch} of config, not the loader's {loader_batch}: samples of one step")
        engine = self._chosen_engine(trial)
        workers = {"workers": given.num_workers} if engine is None else {"engine": engine}
        return TrainConfig(global_batch=batch, epochs=given.epochs, **workers, **run)

    def _chosen_engine(self, trial: Path | None) -> Engine | None:
        if self._engine is not None or trial is None:
            return self._engine or self.settings.engine()
        from paceline.engines.ray.ray_connection import import_ray
        from paceline.engines.ray.ray_job import trial_group

        engine = self.settings.engine()
        # Without bundles for agents, all trials could hold what each other's agents wait for.
        return engine if trial_group(import_ray(), engine.bundle) is not None else None

    def _optimizer_function(self) -> Callable[..., Any]:
        made = self._optimizer
        if made is None:
            from paceline.frontends.loss_inference import default_optimizer

            announce(f"no optimizer: AdamW with lr {self.settings.lr:g}, which is not scaled with the batch")
            return default_optimizer(self.settings.lr, self.settings.weight_decay)
        if _takes_two(made):
            return functools.partial(_swap, made, self.config)
        return made

    def _after_fit(self, what: str) -> Trainer:
        if self._trainer is None:
            raise UsageError(f"{what} before fit: there is no trained model yet", remedy="call fit first")
        return self._trainer


def _swap(make: Callable[..., Any], config: dict[str, Any], parameters: Any) -> Any:
    return make(parameters, config)


def _required(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one for one in parameters if one.kind in kinds and one.default is inspect.Parameter.empty]


def _takes_two(function: Callable[..., Any]) -> bool:
    return len(_required(function)) == 2


def _with_config(model: Any, config: dict[str, Any]) -> Any:
    """Return the model, or a function without arguments where it is one of the settings."""
    from torch import nn

    if isinstance(model, nn.Module) or not callable(model) or len(_required(model)) != 1:
        return model
    return functools.partial(model, config)
