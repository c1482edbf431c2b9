"""The models that the training benchmarks train. Must not know who trains them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(inputs: int, hidden: tuple[int, ...], classes: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU between them, and dropout after each when asked for."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def mlp_1m() -> nn.Module:
    """976 thousand parameters over images of 28 x 28."""
    return mlp(784, (700, 600), 10)


def mlp_25m() -> nn.Module:
    """25.6 million parameters: 102 MB of gradient, so that the exchange is most of the step."""
    return mlp(1024, (3328, 3328, 3328), 10)


def mlp_33m() -> nn.Module:
    """33.5 million parameters: 402 MB of state with Adam's two moments (3 x 4 bytes a parameter)."""
    return mlp(1024, (3840, 3840, 3840), 10)


def mlp_dropout() -> nn.Module:
    return mlp(20, (64, 64), 5, dropout=0.2)


def conv_net() -> nn.Module:
    """Three convolutions and two linear layers over images of 3 x 32 x 32: 620 thousand parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(images)))
        hidden = self.second_norm(self.second(hidden))
        return functional.relu(hidden + self.shortcut(images))


def resnet_small(width: int = 8, classes: int = 5) -> nn.Module:
    """A stem and three residual blocks, every convolution followed by BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.project_in(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        projected: Tensor = self.project_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return projected


class TransformerBlock(nn.Module):
    """Attention and a GELU network of four times the width, each behind a LayerNorm and a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.network_norm = nn.LayerNorm(width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.drop(self.attention(self.attention_norm(hidden)))
        changed: Tensor = hidden + self.drop(self.network(self.network_norm(hidden)))
        return changed


class GPT(nn.Module):
    """A decoder of GPT-2's shape whose output layer is its token embedding. Gives the loss, so that a
    compiler sees the whole step."""

    def __init__(
        self, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.drop(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        scores = self.head(self.norm(hidden))
        return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def gpt_small() -> nn.Module:
    """A few thousand parameters, with dropout and tied weights."""
    return GPT(vocabulary=61, context=16, layers=2, heads=2, width=32, dropout=0.1)


def gpt_124m() -> nn.Module:
    """GPT-2 small: 12 layers of 12 heads, width 768, 1024 tokens of context; vocabulary padded to 50304."""
    return GPT(vocabulary=50304, context=1024, layers=12, heads=12, width=768)


def parameter_count(model: nn.Module) -> int:
    """Tied weights counted once."""
    return sum(parameter.numel() for parameter in model.parameters())
