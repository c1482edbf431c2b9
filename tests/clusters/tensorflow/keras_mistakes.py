"""Bad input of TensorFlowDistributedTrainer, all of it in one process: one line with the message for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import paceline
from paceline.frontends import overrides

folder = Path(sys.argv[1])


def model_fn(compiled: bool = True, units: int = 1) -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(units)])
    if compiled:
        model.compile("sgd", "mse")
    return model


def data(samples: int, batch: int | None = 4) -> Any:
    made = tf.data.Dataset.from_tensor_slices(
        (np.ones((samples, 2), "float32"), np.ones((samples, 1), "float32"))
    )
    return made if batch is None else made.batch(batch)


def trainer(function: Callable[[], Any] = model_fn, strategy: Any = None, **more: Any) -> Any:
    return paceline.TensorFlowDistributedTrainer(
        function, strategy, verbose=False, checkpoint_dir=folder / "run", **more
    )


one = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(one, [tf.config.LogicalDeviceConfiguration()] * 2)
two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def other_model() -> None:
    paceline.TensorFlowDistributedTrainer(model_fn, verbose=False, checkpoint_dir=folder / "kept").fit(
        data(8)
    )
    again = paceline.TensorFlowDistributedTrainer(
        lambda: model_fn(units=3), verbose=False, checkpoint_dir=folder / "kept", resume_from_checkpoint=True
    )
    again.fit(data(8), epochs=2)


def endless_with_max_steps() -> None:
    with overrides.in_force(overrides.Overrides({"max_steps": 3})):
        history = paceline.TensorFlowDistributedTrainer(
            model_fn, verbose=False, checkpoint_dir=folder / "endless"
        ).fit(data(8).repeat(), epochs=2)
    assert [record.step for record in history.steps] == [1, 2, 3]


def too_many_ranks() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    try:
        trainer(strategy="mirrored")
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


mistakes: dict[str, Callable[[], object]] = {
    "empty": lambda: trainer().fit(data(0)),
    "unbatched": lambda: trainer().fit(tf.data.Dataset.from_tensor_slices(np.ones(3, "float32"))),
    "no dataset": lambda: trainer().fit([1, 2]),
    "small batch": lambda: trainer(strategy=two).fit(data(4, 1)),
    "not compiled": lambda: trainer(lambda: model_fn(compiled=False)),
    "no model": lambda: trainer(lambda: 3),
    "a model": lambda: trainer(model_fn()),
    "strategy": lambda: trainer(strategy=3),
    "epochs": lambda: trainer().fit(data(8), epochs=0),
    "other model": other_model,
    "ranks": too_many_ranks,
    "alone": lambda: trainer(strategy="multiworker"),
    "endless": lambda: trainer().fit(data(8).repeat(), epochs=2),
    "endless validation": lambda: trainer().fit(data(8), validation_data=data(8).repeat()),
    "endless evaluation": lambda: trainer().evaluate(data(8).repeat()),
    "endless with max_steps": endless_with_max_steps,
    "late": lambda: trainer(strategy=tf.distribute.get_strategy()).fit(data(8), epochs=1),
}
for name, mistake in mistakes.items():
    try:
        mistake()
    except paceline.UsageError as error:
        print(f"{name}: {error.message}", flush=True)
    else:
        print(f"{name}: accepted", flush=True)
