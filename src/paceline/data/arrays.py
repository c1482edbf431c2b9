"""Samples in memory: a tensor per column, and a batch is the chosen rows of each.

The memory stays the caller's: nothing is copied when a source is made, and workers started with
`paceline.spawn` map one copy. A batch is always a copy, so changing it changes no sample. What
becomes a column is decided in `columns`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.core.errors import UsageError
from paceline.core.wording import counted
from paceline.data.columns import (
    Array,
    Column,
    MappedFile,
    column_of,
    mapped_file,
    pandas_kind,
    portable,
    restore,
)
from paceline.data.source_interface import Batch, Indices


@final
@dataclass(frozen=True, eq=False)
class ArraySource:
    """Columns of equal length. `structure` is how rows of them make a batch; None: the one column does.
    `files`: what each column is a mapping of, if it is one."""

    columns: tuple[Column, ...]
    size: int
    structure: Structure | None
    files: tuple[MappedFile | None, ...]
    pin_memory: bool = False

    def fetch(self, indices: Indices) -> Batch:
        count = len(indices)
        if not count:
            return Batch(None, 0)
        # torch warns about memory that may not be written to, though it only reads here.
        rows = torch.from_numpy(indices if indices.flags.writeable else indices.copy())
        try:
            parts = [take(rows) for take in self._takers]
        except (IndexError, RuntimeError) as error:
            raise self._out_of_range(indices, error) from error
        return Batch(self._rebuilt(parts), count)

    @cached_property
    def _takers(self) -> list[Callable[[Tensor], Any]]:
        return [_taker(column) for column in self.columns]

    def sample(self, number: int) -> Any:
        """Return one sample, not collated: a row of each column."""
        rows = [column[number] for column in self.columns]
        return self._rebuilt([row.clone() if isinstance(row, Tensor) else row for row in rows])

    def _rebuilt(self, parts: list[Any]) -> Any:
        structure = self.structure
        # The usual shapes at once; anything nested goes the general way.
        if structure is None:
            return parts[0]
        if structure.flat:
            return structure.make(parts)
        return _fill(structure, iter(parts))

    def _out_of_range(self, indices: Indices, error: Exception) -> Exception:
        wrong = indices[(indices < 0) | (indices >= self.size)]
        if not len(wrong):
            return UsageError(
                f"rows of in-memory data cannot be taken: {error}",
                remedy="pass plain dense tensors or NumPy arrays",
            )
        return UsageError(
            f"sample {wrong[0]} does not exist: the data has {counted(self.size, 'sample')}",
            remedy=f"ask for numbers from 0 to {self.size - 1}",
        )

    def __getstate__(self) -> dict[str, Any]:
        # A view of a larger array travels as its own elements, and a file that is mapped as its name.
        parts = zip(self.columns, self.files, strict=True)
        state = {**vars(self), "columns": [portable(*part) for part in parts]}
        state.pop("_takers", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, columns=tuple(restore(column) for column in state["columns"]))


def array_source(data: Any) -> ArraySource | None:
    """Return a source of a tensor, an array, a pandas object, or tuples and dicts of them; else None."""
    if not _is_tree_of_columns(data):
        return None
    leaves: list[tuple[str, Any]] = []
    structure = _take_apart(data, "data", leaves)
    columns = tuple(column_of(leaf, name) for name, leaf in leaves)
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        listed = ", ".join(f"{name} has {length}" for (name, _), length in zip(leaves, lengths, strict=True))
        raise UsageError(
            f"the parts of the data differ in how many samples they have: {listed}",
            remedy="the first dimension counts samples and must be equal everywhere",
        )
    if not columns:
        raise UsageError(
            f"an empty {type(data).__name__} has no samples", remedy="pass at least one array or column"
        )
    return ArraySource(columns, lengths[0], structure, tuple(mapped_file(leaf) for _, leaf in leaves))


@final
@dataclass(frozen=True)
class Structure:
    """Structure of a batch: a dict with `keys`, or a `kind` of sequence. A column's child is None."""

    kind: Any
    keys: tuple[Any, ...] | None
    children: tuple[Structure | None, ...]

    @property
    def flat(self) -> bool:
        return not any(self.children)

    def make(self, parts: list[Any]) -> Any:
        if self.keys is not None:
            return dict(zip(self.keys, parts, strict=True))
        if self.kind is tuple:
            return tuple(parts)
        return parts if self.kind is list else self.kind(*parts)


def _fill(structure: Structure | None, parts: Any) -> Any:
    if structure is None:
        return next(parts)
    return structure.make([_fill(child, parts) for child in structure.children])


def _is_tree_of_columns(data: Any) -> bool:
    if isinstance(data, dict):
        return all(_is_tree_of_columns(value) for value in data.values())
    if isinstance(data, tuple):
        return bool(data) and all(_is_tree_of_columns(value) for value in data)
    return isinstance(data, Tensor | np.ndarray) or pandas_kind(data) != ""


def _take_apart(data: Any, name: str, leaves: list[tuple[str, Any]]) -> Structure | None:
    """Append the columns of `data` in order; return how to put rows of them together again."""
    if isinstance(data, dict):
        pairs = list(data.items())
    elif pandas_kind(data) == "DataFrame":
        pairs = _frame_columns(data, name)
    elif isinstance(data, np.ndarray) and data.dtype.names is not None:
        pairs = [(field, data[field]) for field in data.dtype.names]
    elif isinstance(data, tuple):
        children = tuple(_take_apart(value, f"{name}[{place}]", leaves) for place, value in enumerate(data))
        return Structure(type(data), None, children)
    else:
        leaves.append((name, data))
        return None
    children = tuple(_take_apart(value, f"{name}[{key!r}]", leaves) for key, value in pairs)
    return Structure(dict, tuple(key for key, _ in pairs), children)


def _frame_columns(frame: Any, name: str) -> list[tuple[Any, Any]]:
    if not frame.columns.is_unique:
        twice = sorted({str(column) for column in frame.columns[frame.columns.duplicated()]})
        raise UsageError(
            f"{name}: the DataFrame has more than one column named {', '.join(twice)}",
            remedy="rename the columns: a batch is a dict of them",
        )
    return [(column, frame[column]) for column in frame.columns]


def _taker(column: Column) -> Callable[[Tensor], Any]:
    """Return how rows of a column are taken: the quickest way that its dtype and device have."""
    if not isinstance(column, Tensor):
        return partial(_texts, column)
    if column.device.type != "cpu":
        return lambda rows: column.index_select(0, rows.to(column.device))
    try:
        column.new_empty(1).index_select(0, torch.zeros(1, dtype=torch.int64))
    except RuntimeError:
        # Some dtypes (unsigned, 8-bit floats) can be kept but not chosen from: their bits can.
        alike = column.view(_SAME_WIDTH[column.dtype.itemsize])
        return lambda rows: alike.index_select(0, rows).view(column.dtype)
    return partial(column.index_select, 0)


_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _texts(column: Array, rows: Tensor) -> list[Any]:
    # Texts and other objects have no tensor: they come as a list, as torch's own collate gives them.
    if rows.min() < 0:
        raise IndexError("a negative row")
    texts: list[Any] = column.take(rows.numpy()).tolist()
    return texts


def tensor_dataset_source(dataset: TensorDataset) -> ArraySource:
    """Return the rows that a TensorDataset would give, without asking for one row at a time."""
    source = array_source(dataset.tensors)
    if source is None:
        raise UsageError("a TensorDataset without tensors has no samples", remedy="pass at least one tensor")
    # A list, as torch's own collate makes of rows that are tuples.
    return replace(source, structure=Structure(list, None, (None,) * len(source.columns)))
