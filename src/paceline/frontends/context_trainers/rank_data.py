"""The data of the ranks of a context: lists, arrays and tensors in, one data set of all ranks out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.comm.context import DistributedContext
from paceline.core.errors import UsageError
from paceline.core.wording import counted, with_article


def as_rows(data: Any, columns: int, what: str) -> Tensor:
    """Return data as a float tensor of rows; refuse rows of another width by both numbers."""
    rows = as_tensor(data, what)
    given, rows = tuple(rows.shape), rows.float().reshape(rows.shape or (1,))
    if given == (0,):
        return rows.reshape(0, columns)  # an empty list has no width
    if rows.ndim == 1 and columns != 1 and rows.numel() == columns:
        rows = rows.unsqueeze(0)
    rows = rows.unsqueeze(1) if rows.ndim == 1 else rows.flatten(1) if rows.ndim > 2 else rows
    if rows.ndim != 2 or rows.shape[1] != columns:
        raise UsageError(
            f"{what} of shape {given}, and the model takes {counted(columns, 'number')} a sample",
            remedy=f"pass rows of {columns}",
        )
    return rows


def as_tensor(data: Any, what: str) -> Tensor:
    """Return lists, arrays and tensors of numbers as a tensor on the CPU."""
    remedy = "pass a list, array or tensor of real numbers"
    if isinstance(data, Tensor):
        if data.is_complex():
            raise UsageError(f"{what}: a tensor of {data.dtype}", remedy=remedy)
        return data.detach().cpu()
    try:
        array = np.asarray(data, order="C")
    except ValueError as error:
        raise UsageError(
            f"{what} cannot be read as numbers: {error}", remedy="pass rows of equal length"
        ) from None
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{what}: {with_article(data)} that is not of numbers", remedy=remedy)
    native = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
    return torch.from_numpy(native)


def like(data: Any, result: Tensor) -> Any:
    """Return a result in the kind of the data: list, array or tensor."""
    if isinstance(data, Tensor):
        return result
    return result.numpy() if isinstance(data, np.ndarray) else result.tolist()


def gather_rows(context: DistributedContext, data: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, slice]:
    """Return the samples and labels of all ranks, in the order of the ranks, on every rank, and which of them
    are this rank's.

    So a step takes the same samples whichever rank brought them: the result depends on the data of all ranks
    together, and not on how it was cut.
    """
    labels = labels.reshape(labels.shape or (1,))
    if len(data) != len(labels):
        raise UsageError(
            f"rank {context.rank} passes {counted(len(data), 'sample')} and {counted(len(labels), 'label')}",
            remedy="pass one label for each sample",
        )
    gathered = context.all_gather([data, labels])
    first = sum(len(part[0]) for part in gathered[: context.rank])
    parts = [part for part in gathered if len(part[0])]
    if not parts:
        raise UsageError("no rank has a sample", remedy="pass at least one row on some rank")
    kinds = {part[1].is_floating_point() for part in parts}
    shapes = {tuple(part[1].shape[1:]) for part in parts}
    if len(kinds) > 1 or len(shapes) > 1:
        raise UsageError(
            "the labels of the ranks are of different kinds: "
            + "; ".join(sorted({f"{part[1].dtype} of shape {tuple(part[1].shape)}" for part in parts})),
            remedy="pass labels of one dtype and width on every rank",
        )
    own = slice(first, first + len(data))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]), own


def targets_and_loss(labels: Tensor, outputs: int) -> tuple[Tensor, nn.Module]:
    """Return targets and loss by the labels: classes or one-hot rows mean cross-entropy, other numbers the
    squared error."""
    if labels.ndim == 2 and labels.shape[1] == outputs > 1 and _is_one_hot(labels):
        return labels.argmax(1), nn.CrossEntropyLoss()
    if not labels.is_floating_point() and outputs > 1:
        classes = labels.reshape(-1).long()
        wrong = classes[(classes < 0) | (classes >= outputs)]
        if len(wrong) or len(classes) != len(labels):
            raise UsageError(
                f"labels from {int(labels.min())} to {int(labels.max())} of shape {tuple(labels.shape)} for "
                f"{outputs} outputs",
                remedy=f"pass one class from 0 to {outputs - 1} a sample, or floats for regression",
            )
        return classes, nn.CrossEntropyLoss()
    if labels.numel() != len(labels) * outputs:
        raise UsageError(
            f"float labels of shape {tuple(labels.shape)} for {counted(outputs, 'output')}",
            remedy=f"pass {counted(outputs, 'number')} a sample, or whole numbers for classes",
        )
    return as_rows(labels, outputs, "labels"), nn.MSELoss()


def _is_one_hot(labels: Tensor) -> bool:
    ones = functional.one_hot(labels.argmax(1), labels.shape[1])
    return bool(torch.equal(ones.to(labels.dtype), labels))
