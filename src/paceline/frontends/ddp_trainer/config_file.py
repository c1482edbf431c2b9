"""A file of DistributedConfig for a script that may use any trainer: `paceline train --config FILE`.

Counts per GPU become the global ones of TrainConfig, which win over whatever trainer the script calls. What
only `PyTorchDDPTrainer` has (the learning rate, trackers) is passed on to it by name. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, final

from paceline.core import config as core_config
from paceline.core.available_resources import visible_gpus
from paceline.frontends.ddp_trainer.distributed_config import DistributedConfig
from paceline.train.settings.train_config import TrainConfig


@final
@dataclasses.dataclass(frozen=True)
class PerGpuFile:
    """A file's settings; `named` are those that it has."""

    config: DistributedConfig
    named: frozenset[str]
    texts: tuple[str, ...]

    @staticmethod
    def read(path: str) -> PerGpuFile | None:
        """Read a file of DistributedConfig; None: it is one of TrainConfig."""
        given = core_config.read(path)
        if not _is_per_gpu(given):
            return None
        config = core_config.load(DistributedConfig, path)
        return PerGpuFile(config, frozenset(given), core_config.assignments(DistributedConfig, path))

    def global_settings(self, workers: int | None) -> dict[str, Any]:
        """Return the file's settings by their names in TrainConfig; `workers`: that win over the file's."""
        each = self.config.gpus_per_node
        number = workers or self.config.num_gpus or (each and each * self.config.num_nodes)
        meant = self._on_one_node(number or max(1, visible_gpus())).to_train_config()
        by_name: dict[str, dict[str, Any]] = {
            "num_gpus": {"workers": meant.workers},
            "gpus_per_node": {"workers": meant.workers},
            "epochs": {"epochs": meant.epochs},
            "mixed_precision": {"precision": meant.precision},
            "gradient_clipping": {"clip_norm": meant.clip_norm},
            "log_every_n_steps": {"log_every": meant.log_every},
            "checkpoint_frequency": {"checkpoint.every_epochs": meant.checkpoint.every_epochs},
            "checkpoint_dir": {
                name: place
                for name, place in (("run_dir", meant.run_dir), ("checkpoint.url", meant.checkpoint.url))
                if place is not None
            },
        }
        for name in ("batch_size", "gradient_accumulation_steps"):
            by_name[name] = {
                "workers": meant.workers,
                "shards": meant.shards,
                "global_batch": meant.global_batch,
            }
        return {key: value for name in sorted(self.named) for key, value in by_name.get(name, {}).items()}

    def arithmetic(self, settings: Mapping[str, Any]) -> str:
        """Return how the global batch comes about, in a sentence; empty where the file does not set it."""
        if "global_batch" not in settings:
            return ""
        return self._on_one_node(settings["workers"]).arithmetic

    def _on_one_node(self, workers: int) -> DistributedConfig:
        """Return the settings of that many workers, for Paceline's own trainer."""
        return dataclasses.replace(
            self.config, num_gpus=workers, num_nodes=1, gpus_per_node=None, backend="pytorch-ddp"
        )


def _is_per_gpu(given: Mapping[str, Any]) -> bool:
    """Return whether more of the keys are those of DistributedConfig than of TrainConfig."""
    per_gpu, whole = (
        sum(field.name in given for field in dataclasses.fields(cls))
        for cls in (DistributedConfig, TrainConfig)
    )
    return per_gpu > whole
