"""From Lightning to Paceline: the module stays, `training_step` becomes the objective.

python examples/from_lightning.py               with Paceline
python examples/from_lightning.py --before      with Lightning, where it is installed
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from image_files import digits


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def before(epochs: int) -> nn.Module:
    import lightning

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            images, labels = batch
            return F.cross_entropy(self.net(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Digits()
    loader = DataLoader(TensorDataset(*digits()[0]), batch_size=64, shuffle=True)
    lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False).fit(
        module, loader
    )
    return module.net


def after(epochs: int) -> nn.Module:
    def training_step(model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    trainer = paceline.Trainer(
        net,
        training_step,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2),  # configure_optimizers
        config=paceline.TrainConfig(workers=2, global_batch=64, epochs=epochs),  # max_epochs
    )
    trainer.fit(digits()[0])
    assert isinstance(trainer.model, nn.Module)
    return trainer.model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", action="store_true", help="train with Lightning")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    try:
        model = (before if options.before else after)(options.epochs)
    except ImportError as error:
        sys.exit(f"{error}: pip install lightning")
    images, labels = digits()[1]
    with torch.no_grad():
        print(f"accuracy {float((model(images).argmax(1) == labels).float().mean()):.4f}")


if __name__ == "__main__":
    main()
