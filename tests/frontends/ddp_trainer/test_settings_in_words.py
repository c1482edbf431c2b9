"""The sentences that say what settings per GPU mean for the whole run."""

from __future__ import annotations

import paceline
from paceline.frontends.ddp_trainer.settings_in_words import meanings


def test_gpus_and_workers() -> None:
    config = paceline.DistributedConfig(num_gpus=4, batch_size=8)
    arithmetic = "global batch 32 = batch_size 8 x gradient_accumulation_steps 1 x num_gpus 4"
    assert [*meanings(config, 4, None)] == [arithmetic]
    assert [*meanings(config, 8, 8)] == [arithmetic]
    assert [*meanings(config, 2, 8)] == [
        arithmetic,
        "num_gpus 4 on a host with 2 GPUs: workers share them",
    ]
    assert [*meanings(config, 1, 8)][1] == "num_gpus 4 on a host with 1 GPU: workers share it"
    assert [*meanings(config, 0, None)] == [
        arithmetic,
        "no GPU here: num_gpus counts CPU workers, and there are 4",
    ]
    assert [*meanings(config, 4, 8, drops_last=True)] == [
        arithmetic,
        "the DataLoader's drop_last is not used: every sample comes once an epoch",
    ]
    nodes = paceline.DistributedConfig(num_gpus=4, num_nodes=2, batch_size=8)
    assert [*meanings(nodes, 2, 64)] == [
        arithmetic,
        "the DataLoader's batch_size 64 is not used: the trainer's is 8",
    ]
