"""Two optimizers that take turns: a generator learns a ring of eight clusters from a critic.

python examples/gan.py [--workers 2] [--steps 600]
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline

NOISE = 8


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, noise: Tensor) -> Tensor:
        return self.maker(noise)


def objective(model: Any, real: Tensor, step: paceline.StepInfo) -> Tensor:
    made = model(torch.randn(len(real), NOISE))
    if step.optimizer == 1:  # the maker's turn: it wants its points to be taken for real ones
        return F.softplus(-model.critic(made)).mean()
    return F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(made.detach())).mean()


def optimizers(parameters: Any) -> list[torch.optim.Optimizer]:
    named = parameters.named
    critic = [value for name, value in named.items() if name.startswith("critic")]
    maker = [value for name, value in named.items() if name.startswith("maker")]
    return [torch.optim.Adam(part, 2e-3, betas=(0.5, 0.99)) for part in (critic, maker)]


def ring(samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    angles = torch.randint(0, 8, (samples,), generator=generator) * (2 * math.pi / 8)
    centres = torch.stack([angles.cos(), angles.sin()], 1)
    return centres + 0.05 * torch.randn(samples, 2, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    config = paceline.TrainConfig(
        workers=options.workers, global_batch=64, max_steps=options.steps, optimizer_turns=(1, 1)
    )
    trainer = paceline.Trainer(Gan, objective, optimizer=optimizers, config=config)
    history = trainer.fit(ring(4_000))
    with torch.no_grad():
        made = trainer.model(torch.randn(1_000, NOISE, generator=torch.Generator().manual_seed(1)))
    radius = made.norm(dim=1)
    print(f"radius {radius.mean():.2f} (the ring's is 1), weights {history.state_hash[:16]}")


if __name__ == "__main__":
    main()
