"""Lightning's Trainer with its DDP strategy, a logged metric and a checkpoint-free fit."""

import logging
import warnings

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from tests.clusters.torch_backend.scripts.common import BACKEND, hash_of, leave, task
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning").setLevel(logging.ERROR)


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model, self.data = task()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.model(inputs), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, batch_size=8)


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(process_group_backend=BACKEND),
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
classifier = Classifier()
trainer.fit(classifier)
if trainer.is_global_zero:
    print("trained", dist.get_backend(), hash_of(classifier.model.state_dict()))
leave()
