"""One column of in-memory data: a tensor that shares the caller's memory, or an array of texts.

Errors name what cannot be a column and how to convert it. Also how a column travels to another process: as
its own elements and nothing around them, or, where it is a mapped file, as the file's name.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import UnavailableError, UsageError

Array: TypeAlias = np.ndarray[Any, Any]
Column: TypeAlias = "Tensor | Array"

_TEXT_KINDS = "UO"
_NUMBER_KINDS = "biufc"


def column_of(data: Any, name: str) -> Column:
    """Return `data` as a column that shares its memory. `name` is how an error calls it."""
    if isinstance(data, Tensor):
        return _from_tensor(data, name)
    if pandas_kind(data):
        return _from_pandas(data, name)
    return _from_array(data, name)


def portable(column: Column, file: MappedFile | None) -> Any:
    """Return what of a column travels to another process; `restore` makes it a column again."""
    if file is not None:
        return file
    if isinstance(column, Tensor) and column.device.type == "cpu" and column.numel():
        octets: Array = column.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy()
        return _Memory(octets, column.dtype, tuple(column.shape))
    return column


def restore(travelled: Any) -> Column:
    if isinstance(travelled, MappedFile):
        return column_of(travelled.open(), "data")
    if isinstance(travelled, _Memory):
        return torch.from_numpy(travelled.octets).view(travelled.dtype).view(travelled.shape)
    column: Column = travelled
    return column


@final
@dataclass(frozen=True)
class _Memory:
    """A tensor on its way: an array's memory leaves any pickle as a buffer beside it, a tensor's does not."""

    octets: Array
    dtype: torch.dtype
    shape: tuple[int, ...]


def _from_tensor(tensor: Tensor, name: str) -> Tensor:
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{name} is a tensor of layout {tensor.layout}, whose rows cannot be taken",
            remedy="call .to_dense(), or pass a dataset that gives one sample at a time",
        )
    if tensor.dim() == 0:
        raise _no_samples(name)
    if tensor.is_quantized:
        raise UsageError(f"{name} is a quantized tensor", remedy="call .dequantize() first")
    return tensor.detach()


def _from_array(array: Array, name: str) -> Column:
    if array.ndim == 0:
        raise _no_samples(name)
    if isinstance(array, np.ma.MaskedArray):
        raise UsageError(
            f"{name} is a masked array, and a tensor has no mask",
            remedy="fill it: array.filled(value), and pass the mask as an array of its own if it matters",
        )
    kind = array.dtype.kind
    if kind in _TEXT_KINDS:
        if array.ndim > 1:
            raise UsageError(
                f"{name} is an array of dtype {array.dtype} with shape {array.shape}: texts and objects may "
                "only be a flat list",
                remedy="convert it to numbers (array.astype('float32')), or pass a dataset",
            )
        return array
    if kind not in _NUMBER_KINDS:
        raise _no_tensor(name, array.dtype, kind)
    if not array.dtype.isnative:
        raise UsageError(
            f"{name} has the byte order of another machine ({array.dtype.str})",
            remedy="convert it: array.astype(array.dtype.newbyteorder('='))",
        )
    if any(stride < 0 or stride % array.dtype.itemsize for stride in array.strides):
        # torch has no words for such a view; one copy, shared by all workers like any other array.
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        # Rows are only ever copied out, so memory that may not be written to is as good.
        warnings.filterwarnings("ignore", message=".*not writable.*")
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise _no_tensor(name, array.dtype, kind) from error


def _from_pandas(series: Any, name: str) -> Column:
    dtype = series.dtype
    kind = getattr(dtype, "kind", "O")
    if kind in "OU" or str(dtype) in ("string", "str"):
        if str(dtype) == "category":
            raise UsageError(
                f"{name} is a categorical column",
                remedy="pass its codes: series.cat.codes (and keep series.cat.categories to read them)",
            )
        return np.asarray(series.to_numpy(dtype=object))
    if kind not in _NUMBER_KINDS:
        raise _no_tensor(name, dtype, kind)
    if not isinstance(dtype, np.dtype):
        if series.isna().any():
            raise UsageError(
                f"{name} has dtype {dtype} and {int(series.isna().sum())} missing values",
                remedy="fill them (series.fillna(value)), drop those rows, or convert to float",
            )
        return _from_array(series.to_numpy(dtype=getattr(dtype, "numpy_dtype", None)), name)
    return _from_array(series.to_numpy(), name)


def _no_tensor(name: str, dtype: object, kind: str) -> UsageError:
    remedy = "convert it to a dtype of integers, floats or booleans with .astype(...)"
    if kind in "Mm":
        remedy = "convert times to numbers: values.astype('int64') gives them as integers of their unit"
    return UsageError(f"{name} has dtype {dtype}, which no tensor can hold", remedy=remedy)


def _no_samples(name: str) -> UsageError:
    return UsageError(
        f"{name} is a single number: it has no dimension that counts samples",
        remedy="pass an array whose first dimension counts samples",
    )


def pandas_kind(data: Any) -> str:
    """Return "DataFrame", "Series", "Index", or nothing for data that is not pandas'."""
    return class_in("pandas", ("DataFrame", "Series", "Index"), data)


def class_in(package: str, names: Sequence[str], data: Any) -> str:
    """Return which of these classes of a package `data` is: by name, so that the package is never imported
    for data that is not its own."""
    classes = (cls for cls in type(data).__mro__ if cls.__module__.partition(".")[0] == package)
    return next((cls.__name__ for cls in classes if cls.__name__ in names), "")


@final
@dataclass(frozen=True)
class MappedFile:
    """Part of a file that is mapped, not read: every process that opens it uses the same pages."""

    path: str
    length: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def open(self) -> Array:
        try:
            if os.path.getsize(self.path) < self.length:
                raise OSError(f"it has {os.path.getsize(self.path)} bytes and had {self.length}")
            octets = np.memmap(self.path, np.uint8, "r", shape=(self.length,))
        except (OSError, ValueError) as error:
            raise UnavailableError(
                f"the file {self.path} behind in-memory data cannot be mapped here: {error}",
                remedy="keep the file where every worker can read it, or load it: np.asarray(array).copy()",
            ) from error
        return np.ndarray(self.shape, np.dtype(self.dtype), octets, self.offset, self.strides)


def mapped_file(data: Any) -> MappedFile | None:
    """Return the file that an array is a mapping of; None where its memory is the process's own."""
    if not isinstance(data, np.ndarray):
        return None
    array: Array = data
    root: Any = array
    while root is not None and not _is_mapping(root):
        root = getattr(root, "base", None)
    # Pages that were changed after a copy-on-write mapping are in no file.
    if root is None or root.mode == "c":
        return None
    start = array.__array_interface__["data"][0] - root.__array_interface__["data"][0] + root.offset
    return MappedFile(
        path=os.path.abspath(os.fspath(root.filename)),
        length=root.offset + root.nbytes,
        offset=start,
        dtype=array.dtype.str,
        shape=array.shape,
        strides=array.strides,
    )


def _is_mapping(owner: Any) -> bool:
    # The whole mapping itself: a part of one does not know where in the file it begins.
    is_whole = isinstance(owner, np.memmap) and isinstance(owner.base, mmap.mmap)
    return is_whole and owner.filename is not None
