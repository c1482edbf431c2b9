"""A small GPT that writes characters, in the manner of nanoGPT: one file of text, windows of it as samples.

    python examples/char_transformer.py [TEXT] [--steps 300] [--workers 2]

Without a file it reads the source of Python's argparse. `--plain` trains the same in a loop of torch alone,
for comparison.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline

BLOCK, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 32


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text, `stride` characters further each: what comes is to be predicted from what came."""

    def __init__(self, codes: Tensor, stride: int = 1) -> None:
        self.codes, self.stride = codes, stride

    def __len__(self) -> int:
        return (len(self.codes) - BLOCK) // self.stride

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        return self.codes[start : start + BLOCK], self.codes[start + 1 : start + BLOCK + 1]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.after(x))


class Gpt(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters))

    def forward(self, codes: Tensor) -> Tensor:
        places = torch.arange(codes.shape[1], device=codes.device)
        return self.head(self.layers(self.embed(codes) + self.place(places)))


def objective(model: nn.Module, batch: Any) -> Tensor:
    codes, following = batch
    return F.cross_entropy(model(codes).flatten(0, 1), following.flatten())


def train(options: argparse.Namespace, text: Tensor, test: Tensor, characters: int) -> float:
    config = paceline.TrainConfig(
        workers=options.workers,
        global_batch=BATCH,
        max_steps=options.steps,
        warmup_steps=20,
        schedule="cosine",
        clip_norm=1.0,
    )
    trainer = paceline.Trainer(
        lambda: Gpt(characters), objective, optimizer=lambda p: torch.optim.AdamW(p, 3e-3), config=config
    )
    history = trainer.fit(Windows(text))
    print(f"weights {history.state_hash[:16]}, saved in {history.run_dir}")
    return trainer.evaluate(Windows(test, BLOCK))["loss"]


def train_plainly(options: argparse.Namespace, text: Tensor, test: Tensor, characters: int) -> float:
    torch.manual_seed(0)
    model = Gpt(characters)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    windows = Windows(text)
    for step in range(options.steps):
        progress = max(0, step - 20) / max(1, options.steps - 20)
        rate = 3e-3 * min((step + 1) / 20, 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        pairs = [windows[int(start)] for start in torch.randint(len(windows), (BATCH,))]
        optimizer.zero_grad()
        objective(model, tuple(map(torch.stack, zip(*pairs, strict=True)))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        pairs = [Windows(test, BLOCK)[index] for index in range(len(Windows(test, BLOCK)))]
        return float(objective(model, tuple(map(torch.stack, zip(*pairs, strict=True)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default=argparse.__file__, help="a file of text")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plain", action="store_true", help="train in a loop of torch alone")
    options = parser.parse_args()
    text = Path(options.text).read_text(encoding="utf-8")
    known = sorted(set(text))
    codes = torch.tensor([known.index(character) for character in text])
    cut = len(codes) * 95 // 100
    loss = (train_plainly if options.plain else train)(options, codes[:cut], codes[cut:], len(known))
    print(
        f"loss {loss:.4f} on the last 5 % of {len(text)} characters ({math.log(len(known)):.2f} is guessing)"
    )


if __name__ == "__main__":
    main()
