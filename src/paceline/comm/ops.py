"""The arithmetic of reductions: which operations exist, on which dtypes, and in which precision they run.

Rules that hold for every algorithm and transport:

* 16-bit floats (fp16, bf16) are accumulated in fp32 and rounded once, at the end.
* fp32, fp64, complex and integers are accumulated in their own dtype; integers wrap as in torch.
* bool: SUM and MAX are "or", PRODUCT and MIN are "and".
* AVERAGE is SUM divided by the number of contributions; integers and bool refuse it, because it would
  truncate.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import UsageError


class ReduceOp(enum.Enum):
    """Operation that combines contributions, element by element."""

    SUM = "sum"
    AVERAGE = "average"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    # torch.distributed's names for the same.
    AVG = "average"  # noqa: PIE796
    PROD = "product"  # noqa: PIE796


# Binary kernels of the form f(a, b, out=c), all of them safe when c is a or b.
Kernel = Callable[..., Tensor]

_KERNELS: dict[ReduceOp, Kernel] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
}

_WIDENED = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def kernel_of(op: ReduceOp) -> Kernel:
    return _KERNELS[op]


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of `dtype` are summed."""
    return _WIDENED.get(dtype, dtype)


def parse_op(op: ReduceOp | str) -> ReduceOp:
    """Return the operation for a member or its name; anything else is the caller's mistake."""
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str):
        try:
            return ReduceOp(op.lower())
        except ValueError:
            pass
    allowed = ", ".join(f"ReduceOp.{member.name}" for member in ReduceOp)
    raise UsageError(f"op={op!r} is not a reduction", remedy=f"use one of {allowed}")


@cache
def check_op(op: ReduceOp, dtype: torch.dtype) -> None:
    """Refuse what torch cannot compute or what would silently lose information."""
    name = dtype_name(dtype)
    if op is ReduceOp.AVERAGE and not (dtype.is_floating_point or dtype.is_complex):
        raise UsageError(
            f"ReduceOp.AVERAGE of {name} would truncate",
            remedy="use ReduceOp.SUM, or convert the tensor to a floating dtype first",
        )
    if dtype.is_complex and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise UsageError(
            f"ReduceOp.{op.name} of {name}: complex numbers have no order",
            remedy="reduce the absolute values, or use SUM, AVERAGE or PRODUCT",
        )
    try:
        one = torch.ones(1, dtype=accumulator_dtype(dtype), device="cpu")
        kernel_of(op)(one, one, out=one)
        finish(op, one, 2)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"torch cannot compute ReduceOp.{op.name} on {name}: {error}",
            remedy="convert the tensor to a dtype that torch can add, such as float32 or int64",
        ) from error


def finish(op: ReduceOp, total: Tensor, contributions: int) -> None:
    """Turn the accumulated value into the result, in place."""
    if op is ReduceOp.AVERAGE and contributions != 1:
        total.div_(contributions)


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
