"""A word-level language model with an LSTM, as in PyTorch's examples: perplexity on held-out text.

    python examples/word_language_model.py [TEXT] [--epochs 2] [--workers 2]

Without a file it reads the source of Python's argparse. The text is cut into sequences that each begin with
a state of zeros, so that a sample means the same on every worker. `--plain` trains the same in a loop of
torch alone, for comparison.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline

LENGTH, WIDTH, BATCH, KNOWN = 20, 64, 32, 800


class WordModel(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, words)
        self.head.weight = self.embed.weight  # tied, as in the original

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(words))[0])


def objective(model: nn.Module, batch: Any) -> Tensor:
    words, following = batch
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten())


def sequences(codes: Tensor) -> tuple[Tensor, Tensor]:
    count = (len(codes) - 1) // LENGTH
    return codes[: count * LENGTH].view(count, LENGTH), codes[1 : count * LENGTH + 1].view(count, LENGTH)


def train(options: argparse.Namespace, text: Tensor, test: Tensor, words: int) -> float:
    config = paceline.TrainConfig(
        workers=options.workers, global_batch=BATCH, epochs=options.epochs, clip_norm=0.25, seed=1
    )
    trainer = paceline.Trainer(
        lambda: WordModel(words), objective, optimizer=lambda p: torch.optim.Adam(p, 5e-3), config=config
    )
    history = trainer.fit(sequences(text), sequences(test))
    print(f"weights {history.state_hash[:16]}, saved in {history.run_dir}")
    return history.evaluations[-1].metrics["loss"]


def train_plainly(options: argparse.Namespace, text: Tensor, test: Tensor, words: int) -> float:
    torch.manual_seed(1)
    model = WordModel(words)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    x, y = sequences(text)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            objective(model, (x[rows], y[rows])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float(objective(model, sequences(test)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="?", default=argparse.__file__, help="a file of text")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--plain", action="store_true", help="train in a loop of torch alone")
    options = parser.parse_args()
    words = re.findall(r"\w+|[^\w\s]", Path(options.text).read_text(encoding="utf-8"))
    known = {word: number for number, (word, _) in enumerate(Counter(words).most_common(KNOWN - 1), 1)}
    codes = torch.tensor([known.get(word, 0) for word in words])
    cut = len(codes) * 9 // 10
    loss = (train_plainly if options.plain else train)(options, codes[:cut], codes[cut:], len(known) + 1)
    print(f"perplexity {math.exp(loss):.1f} on the last tenth of {len(words)} words")


if __name__ == "__main__":
    main()
