"""Steps of a Keras model under a strategy, as functions of TensorFlow: the loop is Paceline's, and not `fit`.

Keras 3's own `fit` fails under MultiWorkerMirroredStrategy and ParameterServerStrategy; a step of one's own
runs under all of them, with Keras 3 and with tf_keras. Losses are scaled by the replicas as Keras does it,
and the optimizer sums gradients over them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from paceline.core.errors import UsageError
from paceline.core.wording import with_article


@final
class KerasSteps:
    """The compiled functions of one model. Each returns [sum of losses, samples] over all replicas; `train`,
    which takes a batch and a number, has the sum of the replicas' numbers behind them."""

    def __init__(self, tf: Any, strategy: Any, model: Any) -> None:
        self._tf, self._strategy, self._model = tf, strategy, model
        self.train: Callable[[Any, Any], Any] = tf.function(
            lambda batch, number: self._run(self._update, batch, number)
        )
        self.score: Callable[[Any], Any] = tf.function(lambda batch: self._run(self._measure, batch))
        self.score_here: Callable[[Any], Any] = tf.function(self._measure)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        results = self._strategy.run(function, args=args)
        return self._strategy.reduce(self._tf.distribute.ReduceOp.SUM, results, axis=None)

    def _update(self, batch: Any, number: Any) -> Any:
        tf, model = self._tf, self._model
        x, y, weights = parts_of(batch)
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights)
            scaled = model.optimizer.scale_loss(loss) if hasattr(model.optimizer, "scale_loss") else loss
        gradients = tape.gradient(scaled, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return tf.concat([self._figures(loss, x), [number]], 0)

    def _measure(self, batch: Any) -> Any:
        model = self._model
        x, y, weights = parts_of(batch)
        predicted = model(x, training=False)
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weights)
        model.compute_metrics(x, y, predicted, weights)
        return self._figures(loss, x)

    def _figures(self, loss: Any, x: Any) -> Any:
        tf = self._tf
        count = tf.cast(samples_in(tf, x), tf.float64)
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        mean = tf.cast(loss, tf.float64) * replicas  # of this replica's samples
        return tf.stack([tf.where(count > 0, mean * count, tf.zeros_like(mean)), count])

    def metrics(self) -> dict[str, float]:
        """Return what the model's metrics hold since `reset`, but for its own mean of the loss."""
        model = self._model
        named = (
            model.get_metrics_result()
            if hasattr(model, "get_metrics_result")
            else {one.name: one.result() for one in model.metrics}
        )
        return {str(name): float(value) for name, value in named.items() if name != "loss"}

    def reset(self) -> None:
        self._model.reset_metrics()


def parts_of(batch: Any) -> tuple[Any, Any, Any]:
    """Return inputs, targets and weights of a dataset's element."""
    if isinstance(batch, tuple | list) and 1 <= len(batch) <= 3:
        x, y, weights = [*batch, None, None][:3]
        return x, y, weights
    if isinstance(batch, tuple | list):
        raise UsageError(
            f"an element of the dataset has {len(batch)} parts", remedy="give (inputs, targets[, weights])"
        )
    return batch, None, None


def samples_in(tf: Any, x: Any) -> Any:
    """Return the samples of a batch's inputs."""
    return tf.shape(tf.nest.flatten(x)[0])[0]


def built(tf: Any, strategy: Any, model_fn: Callable[[], Any]) -> Any:
    """Return the model of a function, made under the strategy; refuse one that cannot be trained."""
    with strategy.scope():
        model = model_fn()
    if not all(hasattr(model, name) for name in ("trainable_variables", "compute_loss", "compile")):
        raise UsageError(f"model_fn returned {with_article(model)}", remedy="return a compiled Keras model")
    if getattr(model, "optimizer", None) is None:
        raise UsageError(
            "model_fn returned a model that is not compiled: it has no optimizer and no loss",
            remedy='call model.compile(optimizer="sgd", loss=...) in model_fn, and return the model',
        )
    return model


def build_variables(tf: Any, strategy: Any, model: Any, first: Any) -> None:
    """Make all variables of the model and its optimizer, which Keras may leave to the first batch."""
    with strategy.scope():
        if not model.built or not model.variables:
            model(parts_of(first)[0])
        model.optimizer.build(model.trainable_variables)
