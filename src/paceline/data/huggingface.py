"""Hugging Face `datasets`: whole columns of a batch at once, as tensors, and streams that say what they can.

Told by their class's module, so that the package is never imported for data that is not its own. Must not
know which samples are asked for.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.core.errors import UsageError
from paceline.data.iterables import Stream
from paceline.data.mapped import MapSource


def hugging_face_source(data: Any) -> MapSource | Stream | None:
    """A source of a Hugging Face dataset; None for anything else."""
    kind = _kind(data)
    if kind in ("DatasetDict", "IterableDatasetDict"):
        raise UsageError(
            f"a {kind} holds several datasets: {', '.join(map(str, data))}",
            remedy=f"choose one, such as data[{next(iter(data), 'train')!r}]",
        )
    if kind == "Dataset":
        return _from_table(data)
    if kind == "IterableDataset":
        return Stream(
            data if data._formatting is not None else data.with_format("torch"),
            resumable=not _shuffles_in_memory(data),
        )
    return None


def _kind(data: Any) -> str:
    for cls in type(data).__mro__:
        if cls.__module__.partition(".")[0] == "datasets" and cls.__name__.endswith(
            ("Dataset", "DatasetDict")
        ):
            return cls.__name__
    return ""


def _from_table(dataset: Any) -> MapSource:
    kind = dataset.format["type"]
    if kind == "custom":
        # A transform of the user's gives samples of any kind, so they are collated like any dataset's.
        return MapSource(dataset, len(dataset))
    if kind != "torch":
        columns = dataset.format["columns"]
        dataset = dataset.with_format("torch", columns=None if columns == dataset.column_names else columns)
    return MapSource(dataset, len(dataset), _checked_columns, bulk=True)


def _checked_columns(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch as the dataset gives it: tensors, or lists of texts. Lists of tensors are rows that differ."""
    for name, column in batch.items():
        if isinstance(column, Tensor):
            continue
        if any(value is None for value in column):
            raise UsageError(
                f"column {name!r} has missing values in this batch",
                remedy=f"fill or filter them, or leave the column out: dataset.remove_columns({name!r})",
            )
        if any(isinstance(value, Tensor) for value in column):
            shapes = sorted({tuple(value.shape) for value in column if isinstance(value, Tensor)})
            raise UsageError(
                f"the rows of column {name!r} differ in shape and do not make one tensor: {shapes[:4]}",
                remedy="pass a DataLoader with a collate_fn that pads, or map() them to one length",
            )
    return batch


def _shuffles_in_memory(dataset: Any) -> bool:
    """Whether a shuffle buffer sits in the dataset: its own state_dict loses what is in the buffer, so
    resuming by it would skip samples. What cannot be looked into is not trusted."""
    node = getattr(dataset, "_ex_iterable", None)
    if node is None:
        return True
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if "Shuffled" in type(node).__name__:
            return True
        below = getattr(node, "ex_iterable", None)
        waiting.extend([below] if below is not None else getattr(node, "ex_iterables", ()))
    return False
