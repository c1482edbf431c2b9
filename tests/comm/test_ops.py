"""Operations: their names, what they refuse, and the precision they run in."""

from __future__ import annotations

import pytest
import torch

from paceline.comm.ops import ReduceOp, accumulator_dtype, check_op, dtype_name, finish, kernel_of, parse_op
from paceline.core.errors import UsageError


@pytest.mark.parametrize("op", list(ReduceOp))
def test_members_and_names(op):
    assert parse_op(op) is op
    assert parse_op(op.name) is op
    assert parse_op(op.name.lower()) is op


@pytest.mark.parametrize("op", ["mean", "", "avg", None, 1, object()])
def test_anything_else_is_refused_with_what_is_allowed(op):
    with pytest.raises(UsageError) as caught:
        parse_op(op)
    assert all(f"ReduceOp.{member.name}" in caught.value.remedy for member in ReduceOp)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, [True, True, False]),
        (ReduceOp.MAX, [True, True, False]),
        (ReduceOp.PRODUCT, [True, False, False]),
        (ReduceOp.MIN, [True, False, False]),
    ],
)
def test_bool_is_or_and_and(op, expected):
    left, right = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    assert kernel_of(op)(left, right, out=torch.empty_like(left)).tolist() == expected


@pytest.mark.parametrize("op", list(ReduceOp))
def test_kernels_may_write_into_their_operands(op):
    left, right = torch.tensor([2.0, -3.0]), torch.tensor([5.0, 7.0])
    expected = kernel_of(op)(left, right, out=torch.empty(2))
    for target in (0, 1):
        operands = [left.clone(), right.clone()]
        kernel_of(op)(*operands, out=operands[target])
        assert torch.equal(operands[target], expected)


def test_only_sixteen_bit_floats_are_widened():
    assert accumulator_dtype(torch.float16) == accumulator_dtype(torch.bfloat16) == torch.float32
    for dtype in (torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64):
        assert accumulator_dtype(dtype) == dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool])
def test_averages_of_integers_would_truncate(dtype):
    with pytest.raises(UsageError, match="truncate"):
        check_op(ReduceOp.AVERAGE, dtype)
    check_op(ReduceOp.SUM, dtype)


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_complex_numbers_have_no_order(op):
    with pytest.raises(UsageError, match="no order"):
        check_op(op, torch.complex64)


def test_what_torch_cannot_add_is_refused_every_time():
    for _ in range(2):
        with pytest.raises(UsageError, match="float8_e4m3fn"):
            check_op(ReduceOp.SUM, torch.float8_e4m3fn)


def test_an_average_of_one_keeps_its_bits():
    value = torch.tensor([0.1])
    finish(ReduceOp.AVERAGE, value, 1)
    assert torch.equal(value, torch.tensor([0.1]))
    finish(ReduceOp.AVERAGE, value, 4)
    assert torch.equal(value, torch.tensor([0.1]) / 4)
    finish(ReduceOp.SUM, value, 4)
    assert torch.equal(value, torch.tensor([0.1]) / 4)


def test_dtype_names():
    assert dtype_name(torch.bfloat16) == "bfloat16"
