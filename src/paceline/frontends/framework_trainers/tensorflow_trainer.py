"""`paceline.TensorFlowDistributedTrainer`: a Keras model under tf.distribute, with Paceline's checkpoints.

    python train.py                                       one process: all GPUs, or the CPU
    paceline run train.py --nproc-per-node 4              "multiworker": a lost worker has all start again
                                                          "parameter_server": the others go on

TensorFlow trains, with its own sums. What Paceline adds: versions that verify, resume, restarts, trackers,
the journal with a verdict for every lost worker, and `History`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from paceline.core.errors import UsageError
from paceline.core.wording import with_article
from paceline.frontends.error_folding import folding_errors
from paceline.frontends.framework_trainers.framework_settings import (
    FrameworkSettings,
    GivenConfig,
    progress_shown,
)
from paceline.frontends.framework_trainers.tensorflow_strategy import TensorFlowJob, join_job
from paceline.train.callbacks import Modifier, Observer, as_list, refuse_inside
from paceline.train.settings.keyword_hints import explained
from paceline.train.stop_signals import StopRequest

if TYPE_CHECKING:
    from paceline.train.history import History

_HINTS = {
    "model": "use model_fn=..., a function that returns a compiled Keras model",
    "epochs": "give it to fit: trainer.fit(train_dataset, epochs=...)",
    "optimizer": "give it to model.compile in model_fn",
    "loss": "give it to model.compile in model_fn",
    "loss_fn": "give it to model.compile in model_fn",
    "num_workers": "the launcher decides: paceline run SCRIPT --nproc-per-node N",
    "workers": "the launcher decides: paceline run SCRIPT --nproc-per-node N",
    "run_dir": "use checkpoint_dir=...",
    "resume": "use resume_from_checkpoint=True",
}
_COMPILED = "it is the model's: model.compile(optimizer=...) in model_fn"
_OTHERWISE = {
    "learning_rate": _COMPILED,
    "gradient_clipping": _COMPILED,
    "gradient_accumulation_steps": _COMPILED,
    "mixed_precision": 'set keras.mixed_precision.set_global_policy("mixed_float16") in model_fn',
    "communication_backend": "give a strategy with the options that it shall have",
    "find_unused_parameters": "leave it out: it is PyTorch's",
}


@explained(hints=_HINTS)
@final
class TensorFlowDistributedTrainer:
    """A Keras model that tf.distribute trains.

        trainer = paceline.TensorFlowDistributedTrainer(model_fn, strategy="multiworker")
        history = trainer.fit(train_dataset, epochs=3, validation_data=validation)

    model_fn           returns a compiled Keras model (Keras 3 or tf_keras); called under the strategy
    strategy           "mirrored", "multiworker", "parameter_server", a strategy of tf.distribute; None:
                       multiworker where a launcher or TF_CONFIG names several processes, else mirrored
    parameter_servers  processes that hold the variables, for "parameter_server" under a launcher
    config             a DistributedConfig or its file: epochs, checkpoints, trackers

    Make it before datasets and tensors: TensorFlow connects workers before it does anything else.
    """

    def __init__(
        self,
        model_fn: Callable[[], Any],
        strategy: Any = None,
        verbose: bool | int = True,
        *,
        parameter_servers: int = 1,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        resume_from_checkpoint: bool = False,
        config: GivenConfig = None,
        callbacks: Sequence[Observer | Modifier] = (),
    ) -> None:
        if not callable(model_fn) or hasattr(model_fn, "trainable_variables"):
            what = "a model that is made already" if callable(model_fn) else with_article(model_fn)
            raise UsageError(
                f"model_fn is {what}",
                remedy="give a function that returns a compiled Keras model: it is called under the strategy",
            )
        self._settings = FrameworkSettings(
            config, "tensorflow", checkpoint_dir=checkpoint_dir, resume=resume_from_checkpoint
        )
        self._settings.refuse(_OTHERWISE)
        self._callbacks, self._verbose = as_list(callbacks), bool(verbose)
        self._job: TensorFlowJob = join_job(strategy, parameter_servers)
        self.history: History | None = None
        self.model: Any = None
        if self._job.strategy is not None:
            from paceline.frontends.framework_trainers.tensorflow_steps import KerasSteps, built

            self.model = built(self._job.tf, self._job.strategy, model_fn)
            self._steps = KerasSteps(self._job.tf, self._job.strategy, self.model)

    @property
    def strategy(self) -> Any:
        """The strategy of tf.distribute; None in a process that only serves."""
        return self._job.strategy

    @property
    def num_replicas(self) -> int:
        """Copies of the model that train at the same time."""
        return self._job.replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the run's record."""
        return self._job.is_chief

    @property
    def best_accuracy(self) -> float | None:
        """The highest accuracy of the last `fit` on validation data."""
        return None if self.history is None else self.history.best_accuracy

    @folding_errors
    def fit(self, train_dataset: Any, epochs: int | None = None, validation_data: Any = None) -> History:
        """Train to the last epoch; return the history, the same on every worker.

        Batches have the global size, which the strategy cuts for its replicas. A function in place of the
        dataset is called with the epoch's number. A process that serves a chief ends with it, here.
        """
        refuse_inside("fit")
        self._serve()
        from paceline.frontends.framework_trainers.tensorflow_data import EpochDataset
        from paceline.frontends.framework_trainers.tensorflow_loop import TensorFlowLoop
        from paceline.frontends.framework_trainers.tensorflow_state import KerasState
        from paceline.frontends.framework_trainers.tensorflow_steps import build_variables

        job = self._job
        data = EpochDataset(job, train_dataset)
        validation = (
            None if validation_data is None else EpochDataset(job, validation_data, "the validation data")
        )
        if validation is not None:
            validation.refuse_endless()
        config = self._settings.train_config(job.replicas, data.batch // max(1, job.replicas), epochs)
        if config.max_steps is None:
            data.refuse_endless("; or use `paceline train --set max_steps=N`")
        build_variables(job.tf, job.strategy, self.model, data.first)
        with progress_shown(self._verbose and job.is_chief) as shown:
            observers = (*self._callbacks, *self._settings.trackers(), *shown)
            loop = TensorFlowLoop(
                job, self._steps, KerasState(self.model), data, validation, config, observers
            )
            self.history = loop.run()
        return self.history

    @folding_errors
    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Return loss and metrics of the model over a dataset, every worker on its share."""
        self._serve()
        from paceline.frontends.framework_trainers.tensorflow_data import EpochDataset, sizes_of
        from paceline.frontends.framework_trainers.tensorflow_loop import measured
        from paceline.frontends.framework_trainers.tensorflow_steps import build_variables

        data = EpochDataset(self._job, dataset, "the data")
        data.refuse_endless()
        self._job.group.agree(sizes_of(data, "evaluation"))
        build_variables(self._job.tf, self._job.strategy, self.model, data.first)
        return measured(self._job, self._steps, data)[0]

    def close(self) -> None:
        """Let go of the ranks that serve this one; the end of the process does it, too."""
        self._job.close()

    # inside

    def _serve(self) -> None:
        """Serve the chief to its end, in a process that does nothing else, and end with it."""
        job = self._job
        if job.server is None:
            return
        cluster = job.cluster
        assert cluster is not None
        if cluster.meeting is None:
            job.server.join()  # as TensorFlow has it: until the process is ended
        else:
            from paceline.frontends.framework_trainers.framework_ending import ask_to_stop
            from paceline.frontends.framework_trainers.server_ranks import serve_until_done

            # `paceline run` passes a signal on to all ranks: the chief saves with the help of this one.
            with ask_to_stop(StopRequest()):
                serve_until_done(cluster.meeting, cluster.rank)
        sys.exit(0)
