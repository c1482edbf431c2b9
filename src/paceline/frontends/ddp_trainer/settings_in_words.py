"""What the settings of `PyTorchDDPTrainer` mean for the whole run, in sentences for its user; and what
`Trainer` says of its own settings, in the words of this door."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.wording import counted
from paceline.frontends.ddp_trainer.distributed_config import DistributedConfig

# What `Trainer` and its settings say, and what it is called here.
OWN_WORDS = {
    "TrainConfig": "PyTorchDDPTrainer",
    "global_batch": "the global batch (batch_size x gradient_accumulation_steps x num_gpus)",
    "workers": "num_gpus",
    "clip_norm": "gradient_clipping",
    "checkpoint.url": "checkpoint_dir",
    'resume="auto"': "resume_from_checkpoint=True",
    "run_dir": "checkpoint_dir",
    "loss_scaling": "scaler_init_scale and scaler_growth_interval",
    'precision="fp16"': "mixed_precision=True",
    "precision: fp32 -> fp16": "mixed_precision: False -> True",
    "precision: fp16 -> fp32": "mixed_precision: True -> False",
    "shards:": "num_gpus x gradient_accumulation_steps:",
    "resume with the settings and the data of the run": "resume with the settings and the data of the run, "
    "of which num_gpus may change where num_gpus x gradient_accumulation_steps stays",
    "use drop_last=True or another global_batch": "use another batch_size",
}
WORDS_OF_SCALING = {
    "LossScaling": "PyTorchDDPTrainer",
    "initial": "scaler_init_scale",
    "growth_interval": "scaler_growth_interval",
}


def devices(workers: int, gpus: int, nodes: int = 1) -> str:
    """Return what `num_gpus` means on hosts with fewer GPUs than that; empty where each worker has one."""
    if not gpus:
        number = "is 1" if workers == 1 else f"are {workers}"
        return f"no GPU here: num_gpus counts CPU workers, and there {number}"
    if workers > gpus * nodes:
        shared = "it" if gpus == 1 else "them"
        return f"num_gpus {workers} on a host with {counted(gpus, 'GPU')}: workers share {shared}"
    return ""


def meanings(
    config: DistributedConfig, gpus: int, loader_batch: object, *, drops_last: bool = False
) -> Iterator[str]:
    """Yield the sentences, for a host with `gpus` GPUs and a loader with a batch size of its own, if any.
    `drops_last`: the loader leaves out the last batch of an epoch where that is short."""
    yield config.arithmetic
    if sentence := devices(config.workers, gpus, config.num_nodes):
        yield sentence
    if isinstance(loader_batch, int) and loader_batch != config.batch_size:
        yield (
            f"the DataLoader's batch_size {loader_batch} is not used: the trainer's is {config.batch_size}"
        )
    if drops_last:
        yield "the DataLoader's drop_last is not used: every sample comes once an epoch"
    if config.communication_backend is not None:
        yield (
            f"communication_backend {config.communication_backend}: gradients are summed in one fixed order "
            "by Paceline's own exchange, through shared memory on a host and TCP between hosts"
        )
