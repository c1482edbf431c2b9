"""Data for the frameworks that insist on a DataLoader: in memory, a whole batch gathered at once."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Pair: TypeAlias = tuple[Tensor, Tensor]


class InMemory(Dataset[Pair]):
    """`__getitems__` spares the frameworks the cost of collating one sample at a time."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Pair:
        return self.images[index], self.labels[index]

    def __getitems__(self, indices: list[int]) -> Pair:
        ids = torch.tensor(indices)
        return self.images.index_select(0, ids), self.labels.index_select(0, ids)


def loader(data: Pair, batch: int) -> DataLoader[Pair]:
    return DataLoader(InMemory(*data), batch_size=batch, shuffle=True, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch
