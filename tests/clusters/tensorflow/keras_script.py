"""A script with paceline.TensorFlowDistributedTrainer, for one process or the ranks of `paceline run`: one
JSON line for each process that trains. Its data waits at a gate where the test wants to kill a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import paceline

settings = json.loads(sys.argv[1])
folder = Path(settings["folder"])
signalled, wake = socket.socketpair()  # a byte for each signal, also for one that comes before recv
wake.setblocking(False)
signal.set_wakeup_fd(wake.fileno())
rank, attempt = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
(folder.parent / f"pid-{rank}-{attempt}").write_text(str(os.getpid()))
strategy: Any = settings.get("strategy")
if strategy == "two replicas":
    one = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(one, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
if strategy == "own resolver":
    spec = tf.train.ClusterSpec({"worker": settings["workers"]})
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            spec, task_type="worker", task_id=int(rank), rpc_layer="grpc"
        )
    )
if settings.get("legacy"):
    import tf_keras as keras
else:
    import keras


def model_fn() -> Any:
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential([keras.layers.Input((4,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy() if settings.get("metric_object") else "accuracy"
    model.compile(keras.optimizers.Adam(0.01), loss=loss, metrics=[accuracy])
    return model


if settings.get("again"):
    os.chdir(folder.parent)  # each training has a folder of its own below it
make: Any = paceline.make_trainer if settings.get("made") else paceline.TensorFlowDistributedTrainer
trainer = make(
    model_fn,
    strategy=strategy,
    verbose=False,
    checkpoint_dir=None if settings.get("again") else folder,
    resume_from_checkpoint=settings.get("resume", False),
    config={"checkpoint_frequency": 1, "tensorboard": settings.get("tensorboard", False)},
    callbacks=[paceline.CsvLog(every=1)],
)
numbers = np.random.default_rng(0)
inputs = numbers.standard_normal((64, 4)).astype("float32")
targets = (inputs.sum(1) > 0).astype("int32")


def epoch_data(epoch: int) -> Any:
    if epoch == 2 and attempt == "0" and settings.get("waits") == rank:
        gate = folder.parent / "gate"
        gate.with_suffix(".new").write_text(str(os.getpid()))
        gate.with_suffix(".new").rename(gate)
        if settings.get("dies") or settings.get("signalled"):
            signalled.recv(1)  # until the test kills this process, or asks it to stop
        while not settings.get("signalled") and not (folder.parent / "go").exists():
            threading.Event().wait(0.01)
    order = np.random.default_rng(epoch).permutation(len(inputs))
    return tf.data.Dataset.from_tensor_slices((inputs[order], targets[order])).batch(16)


validation = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(16)
if settings.get("only_evaluates"):
    print(
        "FOUND " + json.dumps({"rank": int(rank), **trainer.evaluate(validation)}) + "\n", end="", flush=True
    )
    sys.exit()
here = validation if settings.get("validates", rank) == rank else None
history = trainer.fit(epoch_data, epochs=settings.get("epochs", 4), validation_data=here)
if settings.get("again"):
    history = trainer.fit(epoch_data, epochs=2, validation_data=validation)
found = {
    "rank": int(rank),
    "replicas": trainer.num_replicas,
    "hash": history.state_hash,
    "steps": [record.step for record in history.steps],
    "epochs": [[record.steps, record.samples] for record in history.epochs],
    "losses": [history.epochs[0].loss, history.final_loss],
    "accuracy": history.best_accuracy,
    "workers": history.workers,
    "evaluated": trainer.evaluate(validation),
    "last_evaluation": history.evaluations[-1].metrics,
}
print("FOUND " + json.dumps(found) + "\n", end="", flush=True)  # one write, also unbuffered
